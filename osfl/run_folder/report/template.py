"""The page of `report.html` (jinja2). Python, because a Flower bundle carries no HTML files."""

STYLE = """
:root { color-scheme:light dark; --paper:#fff; --ink:#1c2430; --soft:#5b6675; --line:#e3e7ec;
  --card:#f6f8fa; --blue:#2463c2; --heat:#d6e4f8; --bar:#2463c2 }
@media (prefers-color-scheme:dark) { :root { --paper:#12161c; --ink:#e3e8ef; --soft:#98a4b3;
  --line:#2b333d; --card:#1a2029; --blue:#7fb0ff; --heat:#1f3a63; --bar:#4f86d9 } }
* { box-sizing:border-box }
body { font:15px/1.5 system-ui,sans-serif; color:var(--ink); background:var(--paper);
  max-width:62rem; margin:2.5rem auto; padding:0 1.2rem; overflow-wrap:anywhere }
h1 { font-size:1.7rem; margin:0 } h2 { font-size:1.15rem; margin:2.4rem 0 .6rem }
p.sub,.note { color:var(--soft); margin:.2rem 0 } .note { font-size:.88rem; margin-top:.5rem }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(8.6rem,1fr)); gap:.8rem;
  margin:1.4rem 0 }
.card { background:var(--card); border:1px solid var(--line); border-radius:8px;
  padding:.7rem .8rem }
.card b { display:block; font-size:1.25rem; line-height:1.4; white-space:nowrap }
.card span { color:var(--soft); font-size:.85rem }
.wide { overflow-x:auto; overflow-wrap:normal } .long { overflow-y:auto; max-height:44rem }
.long tr:first-child th { position:sticky; top:0; background:var(--paper); z-index:1 }
.long tr:first-child th:first-child { z-index:2 }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums }
th,td { text-align:right; padding:.35rem .7rem; border-bottom:1px solid var(--line);
  white-space:nowrap }
th:first-child,td:first-child { text-align:left; position:sticky; left:0;
  background:var(--paper) }
td:first-child,.cells th:first-child { white-space:normal; overflow-wrap:anywhere;
  min-width:8rem; max-width:22rem } .cells tr th:first-child { min-width:4.5rem }
th { font-weight:600; color:var(--soft); font-size:.85rem } tr.shown td { font-weight:600 }
td.words { text-align:left; white-space:normal; min-width:9rem; max-width:22rem }
td.heat { background:linear-gradient(to right,var(--heat) var(--w),transparent var(--w))
  no-repeat .6rem 0 / calc(100% - .6rem) 100% }
table.cells { width:auto } .cells th,.cells td { border:0; padding:.1rem .25rem }
.cells th { text-align:right; font-weight:400 } .cells tr:first-child th { text-align:center }
.cells tr th:first-child { text-align:left; padding-right:.7rem }
.cells td { text-align:center; min-width:2.6rem; height:1.9rem }
.cells td:first-child { position:static; min-width:2.6rem }
.cells img { width:64px; display:block; margin:auto } .small img { image-rendering:pixelated }
td.shade { background:rgb(36 99 194 / var(--s)) } td.dark { color:#fff }
img.map { width:min(100%,44rem); image-rendering:pixelated; border:1px solid var(--line) }
details { margin-top:.6rem } summary { cursor:pointer; color:var(--blue); padding:.2rem 0 }
.time td:nth-child(3) { width:60% } .time td:nth-child(3) div { background:var(--bar);
  height:.7rem; border-radius:3px; min-width:2px }
.bars { display:flex; align-items:flex-end; gap:1px; height:7rem;
  border-bottom:1px solid var(--line) }
.bars i { flex:1; max-width:2.5rem; background:var(--bar); height:var(--h); min-height:1px }
code { font-size:.85rem } td code { white-space:normal }
.hint { display:none }
@media (max-width:40rem) { body { margin:1.2rem auto; padding:0 .8rem }
  th,td { padding:.3rem .3rem; font-size:.82rem } th { white-space:normal; font-size:.75rem }
  td:first-child { min-width:4.2rem }
  .cells th { white-space:nowrap }
  .cells tr:first-child th:first-child { white-space:normal; overflow-wrap:normal }
  td.words { min-width:4.5rem } .hint { display:block; margin:.3rem 0; color:var(--soft); font-size:.8rem } .cards { gap:.5rem } .card { padding:.5rem .7rem }
  .card b { font-size:1.1rem }
  .time td:nth-child(3) { width:35% } }
"""

TEMPLATE = (
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<title>OSFL · {{ m.job_id }}</title>
<style>"""
    + STYLE
    + """</style></head><body>
{% macro heat(value) %}
{% if value is none or value != value %}<td>–</td>{% else %}<td class="heat" style="--w:{{ "%.0f"|format(value) }}%">{{ "%.1f"|format(value) }}</td>{% endif %}
{% endmacro %}
{% set swipe = "Swipe the table sideways to see all of its columns." %}
{% macro fold(count, what) %}<details{% if count <= most_open %} open{% endif %}><summary>{{ count }} {{ what }}</summary>{% endmacro %}
<h1>{{ m.method }}</h1>
<p class="sub">job <code>{{ m.job_id }}</code> · seed {{ m.seed }} · {{ m.finished }}{% if m.approximations %} · <b>approximate sampling</b>: {{ m.approximations|join(", ") }}{% endif %}</p>
<div class="cards">
<div class="card"><b>{% if m.average == m.average %}{{ "%.1f"|format(m.average) }} %{% else %}–{% endif %}</b><span>average accuracy{% if m.accuracy|length > 1 %} ({{ m.shown or "mean of all models" }}){% endif %}</span></div>
<div class="card"><b>{{ m.clients|length }}</b><span>clients, {{ m.rounds }} round{{ '' if m.rounds == 1 else 's' }}</span></div>
<div class="card"><b>{{ upload|bytes }}</b><span>uploaded by all clients</span></div>
<div class="card"><b>{{ "{:,}".format(m.server.synthetic_images) }}</b><span>synthetic images</span></div>
{% if m.server.seconds_per_image %}
<div class="card"><b>{{ "%.3g"|format(m.server.seconds_per_image) }} s</b><span>server, per image</span></div>
{% endif %}
{% if total_seconds %}
<div class="card"><b>{{ total_seconds|seconds }}</b><span>from start to report</span></div>
{% endif %}
</div>
{% if m.warnings %}
<h2>Worth a look</h2>
<ul>{% for warning in m.warnings %}{% set text, details = warning|split_details %}<li>{{ text }}{% if details %}<details><summary>details</summary>{{ details }}</details>{% endif %}</li>{% endfor %}</ul>
<p class="note">A payload far larger or smaller than the others' is used all the same: an honest client may be an exception, and one that harms the model need not stand out.</p>
{% endif %}
{% if m.agreement %}
<h2>Do the images show their classes?</h2>
{{ fold(m.agreement|length, "clients") }}
<div class="wide long"><table><tr><th>client</th><th>agreement</th><th>of its weakest class</th><th style="text-align:left">doubted, or not judged</th></tr>
{% for client, found in m.agreement.items() %}
<tr><td>{{ client }}</td>{{ heat(100 * found.agreement) }}{{ heat(100 * found.classes.values()|min) }}<td class="words">{{ found.doubted }}</td></tr>
{% endfor %}
</table></div></details>
<p class="note">How often the kit finds that the prompt of an image's own class fits it better than another class's, in percent; by chance 50. A client that swaps its classes, or whose payload leads the sampling astray, is near chance; so is an honest one where the kit does not know its classes in its domain.</p>
{% endif %}
<h2>Accuracy</h2>
<div class="wide"><table><tr><th>global model</th><th>average</th><th>all images</th><th>balanced</th><th>macro-F1</th></tr>
{% for name, row in m.accuracy.items() %}
<tr{% if name == m.shown and m.accuracy|length > 1 %} class="shown"{% endif %}><td>{{ name }}</td>{{ heat(row.average) }}{{ heat(m.over_images[name]) }}{{ heat(m.scores[name].balanced_accuracy) }}{{ heat(m.scores[name].macro_f1) }}</tr>
{% endfor %}
</table></div>
<p class="note">Top-1, percent. Average: of the clients, each counting once; the others are over all clients' test images together. Balanced: the mean of the classes' accuracies. Every client tested the model itself; its images did not leave it.
{% if m.config["adaptation.steps"] %}{% for name, adapted in m.adapted.items() %}“{{ name }}, adapted” is not one model: each client made its own of {{ name }}, in {{ m.config["adaptation.steps"] }} steps on its training images. {{ adapted }} of {{ m.accuracy[name]|length - 1 }} clients tell of it, and the averages are over them{% if adapted < m.accuracy[name]|length - 1 %}; the others have a guarantee, or could not{% endif %}. {% else %}Clients were to adapt the model to their own images, and none tells of it: with an epsilon none does. {% endfor %}{% endif %}
{% if m.withheld %}<b>Test results are withheld by the sites of {{ m.withheld|join(", ") }} (node-config <code>test-results</code>); the averages are over the others.</b> {% endif %}
{% if m.not_tested %}<b>Not tested everywhere: {{ m.not_tested|join(", ") }}; the averages are over the others.</b>{% endif %}</p>
{% if clients %}
<h2>Each client</h2>
{{ fold(clients|length, "clients") }}
<div class="wide long"><table><tr><th>client</th><th>test images</th>{% for name in columns %}<th>{{ name }}</th>{% endfor %}{% if m.shown %}<th>balanced</th><th>macro-F1</th>{% endif %}</tr>
{% for client in clients %}
<tr><td>{{ client.name }}</td><td>{{ client.images }}</td>{% for value in client.accuracy %}{% if value is none %}<td>not tested</td>{% else %}{{ heat(value) }}{% endif %}{% endfor %}{% if m.shown %}{{ heat(client.balanced_accuracy) }}{{ heat(client.macro_f1) }}{% endif %}</tr>
{% endfor %}
</table></div></details>
{% if m.shown and m.accuracy|length > 1 %}<p class="note">Balanced accuracy and macro-F1 are those of {{ m.shown }}.</p>{% endif %}
{% endif %}
{% if m.influence %}
<h2>What does each client give the model?</h2>
{{ fold(m.influence|length, "clients") }}
<div class="wide long"><table><tr><th>client</th><th>the others' model sees of its images</th><th>it gives images like its own</th><th>it gives images like the others'</th></tr>
{% for client, found in m.influence.items() %}
<tr><td>{{ client }}</td>{{ heat(found.seen) }}{% for gain in (found.own, found.others) %}<td>{{ "%+.1f"|format(gain.points) }} ± {{ "%.1f"|format(gain.half) }}</td>{% endfor %}</tr>
{% endfor %}
</table></div></details>
<p class="note">The model was trained again without each client, and tested on synthetic images that it had not learned, about a fifth of each client's. In percent: how many of a client's images the model of all others takes for what the client says, of classes that others hold, too. In points: what the client adds. Of a client that swaps all its classes fewer may be seen than by chance, {{ "%.3g"|format(100 / classes|length) }} %; of one whose domain is nobody else's few. A lie need not harm images like the others' (below zero), and two that tell the same lie can hide each other. ±: 95 % intervals of these images, for the whole table together; another training would move the figures, too.</p>
{% endif %}
{% if by_class %}
<h2>Each class{% if m.accuracy|length > 1 %}, {{ m.shown }}{% endif %}</h2>
{{ fold(by_class|length, "classes, the weakest first") }}
<div class="wide long"><table><tr><th>class</th><th>test images</th><th>accuracy</th><th>precision</th><th>F1</th><th style="text-align:left">most often taken for</th></tr>
{% for row in by_class %}
<tr><td>{{ row.name }}</td><td>{{ row.images }}</td>{{ heat(row.accuracy) }}{{ heat(row.precision) }}{{ heat(row.f1) }}<td class="words">{% if row.taken_for %}{{ row.taken_for }} ({{ row.taken }}){% endif %}</td></tr>
{% endfor %}
</table></div></details>
{% endif %}
{% if gallery.first %}
<h2>Synthetic images</h2>
<p class="hint">{{ swipe }}</p>
<div class="wide"><table class="cells{% if gallery.small %} small{% endif %}"><tr><th></th>{% for c in gallery.classes %}<th>{{ c }}</th>{% endfor %}</tr>
{% for client, row in gallery.first.items() %}
<tr><th>{{ client }}</th>{% for c in gallery.classes %}<td>{% if c in row %}<img alt="{{ c }}, {{ client }}" src="{{ row[c] }}">{% endif %}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
<p class="note">The first image of every class, a row for each client whose data it stands for.{% if gallery.has_public_domains %} Rows that begin with <code>public</code> are of domains that the server added by their names.{% endif %}{% if gallery.left_out %} Shown are {{ gallery.left_out }}; all images are in the run's folder <code>images</code>.{% endif %}</p>
{% for client, row in gallery.more.items() %}
<details><summary>{{ client }}: up to {{ gallery.each }} images of each class</summary>
<div class="wide"><table class="cells{% if gallery.small %} small{% endif %}">
{% for c, urls in row.items() %}
<tr><th>{{ c }}</th>{% for url in urls %}<td><img loading="lazy" alt="{{ c }}, {{ client }}" src="{{ url }}"></td>{% endfor %}</tr>
{% endfor %}
</table></div></details>
{% endfor %}
{% endif %}
{% if confusion or confusion_map %}
<h2>Confusion matrix{% if m.accuracy|length > 1 %} of {{ m.shown }}{% endif %}</h2>
{% if confusion %}
{{ fold(classes|length, "classes") }}
<p class="hint">{{ swipe }}</p>
<div class="wide"><table class="cells"><tr><th>true \\ predicted</th>{% for c in classes %}<th>{{ c }}</th>{% endfor %}</tr>
{% for row in confusion %}
<tr><th>{{ classes[loop.index0] }}</th>{% for count, share in row %}<td{% if share %} class="shade{% if share > 50 %} dark{% endif %}" style="--s:{{ share }}%"{% endif %}>{{ count or "" }}</td>{% endfor %}</tr>
{% endfor %}
</table></div></details>
{% else %}
<p class="note">What was most often taken for something else:</p>
<div class="wide"><table><tr><th>true</th><th style="text-align:left">predicted</th><th>images</th><th>of the class</th></tr>
{% for row in mistakes %}
<tr><td>{{ row.true }}</td><td class="words">{{ row.predicted }}</td><td>{{ row.images }}</td><td>{{ "%.0f"|format(row.share) }} %</td></tr>
{% endfor %}
</table></div>
<details><summary>The whole matrix, {{ classes|length }} classes</summary>
<img class="map" alt="confusion matrix: a row for each true class, a column for each predicted one" src="{{ confusion_map }}"></details>
{% endif %}
<p class="note">All clients' test images; shades are shares of a row.</p>
{% endif %}
{% if rounds %}
<h2>Time of each round</h2>
<div class="bars" role="img" aria-label="seconds of each round">{% for r in rounds %}<i style="--h:{{ "%.1f"|format(r.height) }}%" title="{{ r.title }}"></i>{% endfor %}</div>
<p class="note">Rounds {{ rounds[0].first }} to {{ rounds[-1].last }}; the longest bar is {{ rounds|map(attribute="seconds")|max|seconds }}{% if rounds[0].first != rounds[0].last %} a round, and each bar the mean of several{% endif %}. Accuracy is measured once, at the end: the test images stay with the clients.</p>
{% endif %}
{% if phases %}
<h2>What took how long</h2>
<div class="wide"><table class="time"><tr><th>phase</th><th>time</th><th></th></tr>
{% for p in phases %}
<tr><td>{{ p.phase }}</td><td>{{ p.seconds|seconds }}</td><td><div style="margin-left:{{ "%.2f"|format(p.left) }}%;width:{{ "%.2f"|format(p.width) }}%"></div></td></tr>
{% endfor %}
</table></div>
<p class="note">On the server's clock, since the server was last started for this job.</p>
{% endif %}
<h2>What it cost</h2>
{{ fold(m.clients|length, "clients") }}
<p class="hint">{{ swipe }}</p>
<div class="wide long"><table><tr><th>client</th><th>upload</th><th>download</th><th>images</th><th>seconds</th><th>compute</th><th>peak memory</th></tr>
{% for name, c in m.clients.items() %}
<tr><td>{{ name }}</td><td>{{ c.upload_bytes|bytes }}</td><td>{% if c.download_bytes is defined %}{{ c.download_bytes|bytes }}{% else %}–{% endif %}</td>
{% if c.seconds is defined %}<td>{{ "%.0f"|format(c.images) }}</td><td>{{ "%.1f"|format(c.seconds) }}</td><td>{{ c.flops|flops }}</td><td>{{ (c.peak_memory_mb * 1e6)|bytes }}</td>
{% elif c.epsilon %}<td>not sent</td><td>not sent</td><td>not sent</td><td>not sent</td>
{% else %}<td>–</td><td>0</td><td>0</td><td>–</td>{% endif %}</tr>
{% endfor %}
</table></div></details>
<p class="note">Upload: the payload as serialised. Download: the kit's parts that the client needs, and the global models. Server:
{{ "%.1f"|format(m.server.synthesis_seconds) }} s of synthesis{% for name, s in m.server.training_seconds.items() %}, {{ "%.1f"|format(s) }} s of training {{ name }}{% if name in m.server.trained_images %} on {{ "{:,}".format(m.server.trained_images[name]) }} images{% endif %}{% endfor %}.</p>
{% if m.sends %}
<h2>What left the clients</h2>
<p class="note">Each client sent {{ m.sends }}. From it{% if m.epsilons and m.epsilons[0] > 0 %}, without what was done for privacy,{% endif %} somebody could learn {{ m.reveals }}.
{% if m.epsilons and m.epsilons[0] > 0 %}It is differentially private for one image replaced, with ε = {{ "%g"|format(m.epsilons[0]) }}{% if m.epsilons|length > 1 %} to {{ "%g"|format(m.epsilons[-1]) }}{% endif %}{% if m.delta %} and δ = {{ "%g"|format(m.delta) }}{% endif %}. That does not cover which classes a client sends{% if m.delta %}, nor how many images of each it has{% endif %}, nor whether and when a client answers or fails.
{% else %}There is no guarantee of differential privacy{% if m.epsilons and m.epsilons[-1] > 0 %} for some clients{% endif %}.
{% endif %}Beside it, and without a guarantee, each sent {% if not m.epsilons or m.epsilons[0] == 0 %}what the work cost it, and {% endif %}{% if m.withheld %}, but for the sites that withhold it, {% endif %}the confusion matrix of its own test images{% if m.adapted %}, also of the model that it adapted with its training images{% endif %}.
<code>osfl audit</code>, run by a client, measures what its payload gives away of whose images made it.</p>
{% endif %}
<h2>How to repeat it</h2>
<p class="note">{{ m.platform }}{% if m.kit_sha256 %} · kit <code>{{ m.kits|join(", ") }}</code>, sha256 <code>{{ m.kit_sha256[:16] }}</code>{% endif %}</p>
<p class="hint">{{ swipe }}</p>
<div class="wide"><table><tr>{% for p in m.versions %}<th style="text-align:left">{{ p }}</th>{% endfor %}</tr><tr>{% for v in m.versions.values() %}<td style="text-align:left">{{ v }}</td>{% endfor %}</tr></table></div>
<details><summary>Resolved configuration</summary><div class="wide long"><table>{% for key, value in m.config.items() %}<tr><td><code>{{ key }}</code></td><td><code>{{ value }}</code></td></tr>{% endfor %}</table></div></details>
</body></html>
"""
)
