"""The page of `report.html` (jinja2). Python, because a Flower bundle carries no HTML files."""

TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>OSFL · {{ m.job_id }}</title>
<style>
:root { --ink:#1c2430; --soft:#5b6675; --line:#e3e7ec; --card:#f6f8fa; --blue:#2463c2; }
* { box-sizing:border-box } body { font:15px/1.5 system-ui,sans-serif; color:var(--ink); max-width:62rem; margin:2.5rem auto; padding:0 1.2rem }
h1 { font-size:1.7rem; margin:0 } h2 { font-size:1.1rem; margin:2.4rem 0 .6rem } p.sub,.note { color:var(--soft); margin:.2rem 0 }
.cards { display:flex; flex-wrap:wrap; gap:.8rem; margin:1.4rem 0 } .card { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:.7rem 1rem; flex:1 1 8.5rem }
.card b { display:block; font-size:1.45rem; line-height:1.3 } .card span { color:var(--soft); font-size:.85rem }
.wide { overflow-x:auto } table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums }
th,td { text-align:right; padding:.35rem .7rem; border-bottom:1px solid var(--line); white-space:nowrap } th:first-child,td:first-child { text-align:left }
th { font-weight:600; color:var(--soft); font-size:.85rem } tr.shown td { font-weight:600 }
td.heat { background:linear-gradient(to right,#d6e4f8 var(--w),transparent var(--w)) }
table.cells { width:auto } .cells th { text-align:right; font-weight:400 } .cells tr:first-child th { text-align:center } .cells th,.cells td { border:0; padding:.1rem .25rem }
.cells td { text-align:center; min-width:2.6rem; height:1.9rem } .cells img { width:64px; display:block; margin:auto; image-rendering:pixelated }
td.shade { background:rgb(36 99 194 / var(--s)) } td.dark { color:#fff }
details { margin-top:.6rem } summary { cursor:pointer; color:var(--blue) } code { font-size:.85rem }
</style></head><body>
<h1>{{ m.method }}</h1>
<p class="sub">job <code>{{ m.job_id }}</code> · seed {{ m.seed }} · {{ m.finished }}{% if m.approximations %} · <b>approximate sampling</b>: {{ m.approximations|join(", ") }}{% endif %}</p>
<div class="cards">
<div class="card"><b>{{ "%.1f"|format(m.average) }} %</b><span>average accuracy{% if m.accuracy|length > 1 %} ({{ m.shown or "mean of all models" }}){% endif %}</span></div>
<div class="card"><b>{{ m.clients|length }}</b><span>clients, {{ m.rounds }} round{{ '' if m.rounds == 1 else 's' }}</span></div>
<div class="card"><b>{{ upload|bytes }}</b><span>uploaded by all clients</span></div>
<div class="card"><b>{{ m.server.synthetic_images }}</b><span>synthetic images</span></div>
{% if m.server.seconds_per_image %}
<div class="card"><b>{{ "%.3g"|format(m.server.seconds_per_image) }} s</b><span>server, per image</span></div>
{% endif %}
</div>
{% if m.warnings %}
<h2>Worth a look</h2>
<ul>{% for warning in m.warnings %}<li>{{ warning }}</li>{% endfor %}</ul>
<p class="note">Payloads far larger or smaller than the others'. They were used: an honest client may be an exception, and one that harms the model need not stand out.</p>
{% endif %}
<h2>Accuracy on each client's own test images</h2>
<div class="wide"><table><tr><th>global model</th>{% for n in names %}<th>{{ n }}</th>{% endfor %}<th>average</th><th>all images</th></tr>
{% for name, row in m.accuracy.items() %}
<tr{% if name == m.shown and m.accuracy|length > 1 %} class="shown"{% endif %}><td>{{ name }}</td>
{% for n in names + ["average"] %}
{% if n in row %}<td class="heat" style="--w:{{ "%.0f"|format(row[n]) }}%">{{ "%.1f"|format(row[n]) }}</td>{% else %}<td>not tested</td>{% endif %}
{% endfor %}<td class="heat" style="--w:{{ "%.0f"|format(m.over_images[name]) }}%">{{ "%.1f"|format(m.over_images[name]) }}</td></tr>
{% endfor %}
</table></div>
<p class="note">Top-1, percent. Average: of the clients, each counting once; all images: of their test images together. Every client tested the model itself; its images did not leave it.
{% if m.not_tested %}<b>Not tested everywhere: {{ m.not_tested|join(", ") }}; the averages are over the others.</b>{% endif %}</p>
{% if pictures %}
<h2>Synthetic images</h2>
<div class="wide"><table class="cells"><tr><th></th>{% for c in pictured %}<th>{{ c }}</th>{% endfor %}</tr>
{% for client, row in pictures.items() %}
<tr><th>{{ client }}</th>{% for c in pictured %}<td>{% if c in row %}<img alt="{{ c }}, {{ client }}" src="{{ row[c] }}">{% endif %}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
<p class="note">The first image of every class, a row for each client whose data it stands for.</p>
{% endif %}
<h2>What it cost</h2>
<div class="wide"><table><tr><th>client</th><th>upload</th><th>download</th><th>images</th><th>seconds</th><th>compute</th><th>peak memory</th></tr>
{% for name, c in m.clients.items() %}
<tr><td>{{ name }}</td><td>{{ c.upload_bytes|bytes }}</td><td>{% if c.download_bytes is defined %}{{ c.download_bytes|bytes }}{% else %}–{% endif %}</td>
{% if c.seconds is defined %}<td>{{ "%.0f"|format(c.images) }}</td><td>{{ "%.1f"|format(c.seconds) }}</td><td>{{ c.flops|flops }}</td><td>{{ (c.peak_memory_mb * 1e6)|bytes }}</td>
{% else %}<td>–</td><td>0</td><td>0</td><td>–</td>{% endif %}</tr>
{% endfor %}
</table></div>
<p class="note">Upload: the payload as serialised. Download: the kit's parts that the client needs, and the global models; a hub's kit is not counted. Server:
{{ "%.1f"|format(m.server.synthesis_seconds) }} s of synthesis{% for name, s in m.server.training_seconds.items() %}, {{ "%.1f"|format(s) }} s of training {{ name }}{% endfor %}.</p>
{% if confusion %}
<h2>Confusion matrix{% if m.accuracy|length > 1 %} of {{ m.shown }}{% endif %}</h2>
<div class="wide"><table class="cells"><tr><th>true \\ predicted</th>{% for c in classes %}<th>{{ c }}</th>{% endfor %}</tr>
{% for row in confusion %}
<tr><th>{{ classes[loop.index0] }}</th>{% for count, share in row %}<td{% if share %} class="shade{% if share > 50 %} dark{% endif %}" style="--s:{{ share }}%"{% endif %}>{{ count or "" }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
<p class="note">All clients' test images; shades are shares of a row.</p>
{% endif %}
<h2>How to repeat it</h2>
<p class="note">{{ m.platform }}{% if m.kit_sha256 %} · kit <code>{{ m.kits|join(", ") }}</code>, sha256 <code>{{ m.kit_sha256[:16] }}</code>{% endif %}</p>
<div class="wide"><table><tr>{% for p in m.versions %}<th style="text-align:left">{{ p }}</th>{% endfor %}</tr><tr>{% for v in m.versions.values() %}<td style="text-align:left">{{ v }}</td>{% endfor %}</tr></table></div>
<details><summary>Resolved configuration</summary><table>{% for key, value in m.config.items() %}<tr><td><code>{{ key }}</code></td><td><code>{{ value }}</code></td></tr>{% endfor %}</table></details>
</body></html>
"""
