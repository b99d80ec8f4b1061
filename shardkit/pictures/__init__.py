"""pictures: one self-contained page, or a few lines of block glyphs, made of what a verb found.

`page` is the frame of all pages, and alone puts text into HTML. `held`, `damage` and `changes` say what is on theirs; `page.js`
draws it and `page.css` says how it looks. `glyphs` draws in a terminal.

Internal: import from `shardkit`.
"""
