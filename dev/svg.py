"""A picture in SVG for light or dark pages, with a title and a description that screen readers read. It contains no script."""
import html
import math

COLORS = {
    "light": {"text": "#1f2328", "soft": "#59636e", "grid": "#d8dee4", "back": "#ffffff", "fill": "#eef2f6",
              "shoal": "#0072b2", "shoal-fill": "#dbeaf6", "peer": "#b8c0c8", "peer-soft": "#dfe3e8",
              "alarm": "#c0392b", "alarm-fill": "#fbe5e1", "a": "#b35900", "b": "#00795a", "c": "#a0478a", "d": "#6639a6"},
    "dark": {"text": "#f0f6fc", "soft": "#9198a1", "grid": "#30363d", "back": "#131416", "fill": "#1f252c",
             "shoal": "#56b4e9", "shoal-fill": "#12324a", "peer": "#57606a", "peer-soft": "#343b44",
             "alarm": "#ff7b72", "alarm-fill": "#4a1d1a", "a": "#f0a050", "b": "#3fc79a", "c": "#e39ac7", "d": "#b69bf1"}}


class Picture:
    """Collects elements by name of color; text() draws the scheme's version of them. Lengths are in pixels."""

    def __init__(self, width, height, title, description, size=15):
        self.head = (width, height, size, title, description)
        self.elements = []

    def _add(self, element, **colors):
        self.elements.append((element, colors))

    def write(self, x, y, text, color="text", anchor="start", weight="normal", size=None, font=None):
        extra = (f' font-size="{size}"' if size else "") + (f' font-family="{font}"' if font else "")
        self._add(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"{extra} fill="{{color}}">'
                  f'{braced(html.escape(text, quote=False))}</text>', color=color)

    def line(self, points, color="grid", width=1.0, dash="", arrow=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add(f'<polyline points="{path}" fill="none" stroke="{{color}}" stroke-width="{width}"'
                  f'{f" stroke-dasharray={chr(34)}{dash}{chr(34)}" if dash else ""} stroke-linejoin="round"/>', color=color)
        if arrow:
            self._head(points[-2], points[-1], color)

    def _head(self, before, tip, color, length=9, half=4.5):
        """Draws the head of an arrow. Markers are not used, because renderers differ in them."""
        angle = math.atan2(tip[1] - before[1], tip[0] - before[0])
        base = tip[0] - length * math.cos(angle), tip[1] - length * math.sin(angle)
        side = half * math.sin(angle), -half * math.cos(angle)
        corners = (tip, (base[0] + side[0], base[1] + side[1]), (base[0] - side[0], base[1] - side[1]))
        self._add(f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}" fill="{{color}}"/>', color=color)

    def box(self, x, y, width, height, color, edge=None, radius=3.0, dash=""):
        stroke = ' stroke="{edge}"' + (f' stroke-dasharray="{dash}"' if dash else "") if edge else ""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"'
        self._add(f'<rect {place} fill="{{color}}"{stroke}/>', color=color, **({"edge": edge} if edge else {}))

    def dot(self, x, y, color, radius=3.5):
        self._add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{{color}}"/>', color=color)

    def text(self, scheme):
        """Returns the file's text. A picture has its own background, so that it can be read on any page."""
        width, height, size, title, description = self.head
        colors = COLORS[scheme]
        body = [element.format(**{key: colors[name] for key, name in names.items()}) for element, names in self.elements]
        return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
                          f'font-family="system-ui, sans-serif" font-size="{size}" role="img" aria-labelledby="title desc">',
                          f'<title id="title">{html.escape(title, quote=False)}</title>',
                          f'<desc id="desc">{html.escape(description, quote=False)}</desc>',
                          f'<rect width="100%" height="100%" fill="{colors["back"]}"/>', *body, "</svg>", ""])


def braced(text):
    """Returns text in which str.format() leaves braces as they are."""
    return text.replace("{", "{{").replace("}", "}}")


def markup(name, alt):
    """Returns the lines of Markdown that show a picture of a page in docs/, dark on dark pages."""
    return (f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="pictures/{name}-dark.svg">\n'
            f'  <img src="pictures/{name}-light.svg" alt="{html.escape(alt)}">\n</picture>\n')
