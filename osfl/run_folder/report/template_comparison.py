"""The jinja2 template of a site's page with its own images beside the synthetic ones."""

from osfl.run_folder.report.template import HEAD, STYLE

COMPARISON_PAGE = (
    HEAD
    + """<title>OSFL · {{ job }} · {{ client }}</title>
<style>"""
    + STYLE
    + """</style></head><body>
{% macro cells(urls, text) %}{% for url in urls %}<td><img alt="{{ text }}" src="{{ url }}"></td>{% endfor %}{% for _ in range(most - urls|length) %}<td></td>{% endfor %}{% endmacro %}
<h1>Own and synthetic images</h1>
<p class="sub">client <code>{{ client }}</code> · job <code>{{ job }}</code> · {{ method }}</p>
<p class="note"><b>This file holds training images of this site.</b> It was written here (node-config <code>comparison-dir</code>), and neither it nor anything about it was sent. The server of the job made the synthetic images from this site's payload, and sent them with the global model.</p>
<p class="hint">Swipe the table sideways to see all of its columns.</p>
<div class="wide"><table class="cells"><tr><th></th><th colspan="{{ most }}">own</th><th></th><th colspan="{{ most }}">synthetic</th></tr>
{% for row in rows %}
<tr><th>{{ row.name }}</th>{{ cells(row.own, row.name ~ ", own") }}<th></th>{{ cells(row.synthetic, row.name ~ ", synthetic") }}</tr>
{% endfor %}
</table></div>
<p class="note">Up to {{ most }} images of each class, of those for which images were sent. Similar style is what the method aims at; a synthetic image that repeats an own one would be a leak, for which <code>osfl audit</code> tests.</p>
</body></html>
"""
)
