"""HTML tables and SVG figures, reduced to what they need: anything that could act is left out.

Both work by allow-list: an element or attribute that is not named here does not pass.
"""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TABLE = _words("table thead tbody tfoot tr th td caption colgroup col")
_TEXT = _words("div p br b i em strong sub sup code small span")
_VOID = _words("br col")
_SILENT = _words("script style iframe object template noscript svg math")
_HTML_ATTRIBUTES = _words("class colspan rowspan scope border")
_SVG_ELEMENTS = _words(
    "svg g defs path rect circle ellipse line polyline polygon text tspan use clipPath symbol style"
    " title desc linearGradient radialGradient stop pattern mask marker image"
)
_SVG_ATTRIBUTES = _words(
    "id class style d x y x1 y1 x2 y2 cx cy r rx ry fx fy dx dy width height viewBox version"
    " preserveAspectRatio transform points fill fill-opacity fill-rule stroke stroke-width"
    " stroke-opacity stroke-linecap stroke-linejoin stroke-dasharray stroke-dashoffset opacity"
    " clip-path clip-rule clipPathUnits mask offset stop-color stop-opacity gradientUnits"
    " gradientTransform patternUnits patternTransform markerWidth markerHeight refX refY orient"
    " font-family font-size font-style font-weight text-anchor type role aria-label aria-labelledby"
)
_OUTSIDE = re.compile(r"url\(\s*(?!['\"]?#)|@import|expression|javascript:|\\", re.IGNORECASE)


def table(text: str) -> str | None:
    """Return the HTML of a table (pandas') with text, structure and classes only.

    Scripts and styles go with their contents, other unknown elements without them.

    Returns:
        The reduced HTML, or None when it holds no table.
    """
    reader = _Table()
    reader.feed(text)
    reader.close()
    return "".join(reader.parts).strip() if reader.tables else None


class _Table(HTMLParser):
    """Writes down the allowed part of what it reads, with every element closed once."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.tables = 0
        self.open: list[str] = []
        self.silent: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SILENT:
            self.silent.append(tag)
        if self.silent or tag not in _TABLE | _TEXT:
            return
        self.tables += tag == "table"
        kept = [(k, v) for k, v in attrs if k in _HTML_ATTRIBUTES and v is not None]
        written = "".join(f' {k}="{html.escape(v)}"' for k, v in kept)
        self.parts.append(f"<{tag}{written}>")
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.silent:
            del self.silent[self.silent.index(tag) :]
        elif not self.silent and tag in self.open:
            while (last := self.open.pop()) != tag:
                self.parts.append(f"</{last}>")
            self.parts.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.parts.append(html.escape(data, quote=False))

    def close(self) -> None:
        super().close()
        self.parts += [f"</{tag}>" for tag in reversed(self.open)]


def figure(text: str) -> str | None:
    """Return an SVG figure with drawing elements only; None when it is no well-formed SVG.

    Scripts, foreign objects, metadata, event handlers, animations and references to anything
    outside the figure are left out; embedded PNG pictures stay.
    """
    if "<!ENTITY" in text:
        return None
    try:
        tree = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError):
        return None
    if tree.tag != f"{{{SVG}}}svg":
        return None
    _reduce(tree)
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    return ElementTree.tostring(tree, encoding="unicode")


def _reduce(element: ElementTree.Element) -> None:
    """Remove from an element, in place, all that is not allowed."""
    for child in list(element):
        name = child.tag.removeprefix(f"{{{SVG}}}") if isinstance(child.tag, str) else ""
        if name in _SVG_ELEMENTS and not (name == "style" and _OUTSIDE.search(child.text or "")):
            _reduce(child)
        else:
            element.remove(child)
    for name, value in list(element.attrib.items()):
        if not _harmless(name, value):
            del element.attrib[name]


def _harmless(name: str, value: str) -> bool:
    if name in (f"{{{XLINK}}}href", "href"):
        return value.startswith(("#", "data:image/png;base64,"))
    return name in _SVG_ATTRIBUTES and not _OUTSIDE.search(value)
