"""pictures: the result of a verb as a self-contained page, or as a few lines of block glyphs.

`page` renders all pages; no other module inserts text into HTML. `held`, `damage` and `changes` provide the contents,
`page.js` draws them, `page.css` styles them. `glyphs` draws in a terminal.

Internal: import from `shardkit`.
"""
