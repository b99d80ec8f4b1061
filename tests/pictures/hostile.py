"""Names that would do something in a page that takes them as they are."""

NAMES = (
    '</script><img src=x onerror="window.hacked=1">.weight',
    "layers.0.\"'onmouseover='window.hacked=1' x=\".weight",
    "<svg/onload=window.hacked=1>.weight",
    "&lt;script&gt;window.hacked=1&lt;/script&gt;.weight",
    "a\u202eb\u2066c\u2028d.weight",
    "]]><!--<script>.weight",
    "x" * 10_000 + ".weight",
    "`${window.hacked=1}`.weight",
    "layers.1.\u00fc\u4f60.weight",
)
