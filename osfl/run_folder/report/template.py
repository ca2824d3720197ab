"""The jinja2 template of `report.html`, in Python because a Flower bundle has no HTML files."""

from osfl.run_folder.report.curves_template import CURVES_STYLE, CURVES_TEMPLATE
from osfl.run_folder.report.template_parts import (
    GAIN,
    KINDS,
    TIMELINE,
    TIMELINE_STYLE,
    VERSIONS,
    VERSIONS_STYLE,
)

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
  .card b { font-size:1.1rem } }
p.lead { font-size:1.12rem; margin:1rem 0 0 }
"""

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
"""

TEMPLATE = (
    HEAD
    + """<title>OSFL · {{ m.job_id }}</title>
<style>"""
    + STYLE
    + CURVES_STYLE
    + TIMELINE_STYLE
    + VERSIONS_STYLE
    + """</style></head><body>
{% macro heat(value) %}
{% if value is none or value != value %}<td>–</td>{% else %}<td class="heat" style="--w:{{ "%.0f"|format(value) }}%">{{ "%.1f"|format(value) }}</td>{% endif %}
{% endmacro %}
{% set swipe = "Swipe the table sideways to see all of its columns." %}
{% macro fold(count, label) %}<details{% if count <= most_open %} open{% endif %}><summary>{{ count }} {{ label }}</summary>{% endmacro %}
<h1>{{ m.method }}</h1>
<p class="sub">job <code>{{ m.job_id }}</code> · seed {{ m.seed }} · {{ m.finished }}{% if m.approximations %} · <b>approximate sampling</b>: {{ m.approximations|join(", ") }}{% endif %}</p>
<p class="lead">{{ m.summary }}</p>
{% if m.version %}<p class="note">Version {{ m.version.number }} of the model, which continues job <code>{{ m.version.job }}</code>: payloads of {{ m.version.carried|join(", ") or "no client" }} are from there, with their costs and images; new payloads: {{ m.version.new|join(", ") or "none" }}. {{ "Training started from the earlier model" if m.version.from_model else "Trained anew" }}. SHA-256 of all payloads: <code>{{ m.version.payloads[:16] }}</code>.</p>
{% endif %}
{% if m.forgotten %}<p class="note">This run has forgotten {{ m.forgotten }} client{{ '' if m.forgotten == 1 else 's' }}: all results are computed without {{ 'it' if m.forgotten == 1 else 'them' }}. The records are in <code>forgotten/</code>.</p>
{% endif %}
{% if m.payloads_from %}<p class="note">The payloads are those of job <code>{{ m.payloads_from }}</code>, and so are the clients' costs: no client was asked for a payload, and none sent one.</p>
{% endif %}
<div class="cards">
<div class="card"><b>{% if m.average == m.average %}{{ "%.1f"|format(m.average) }} %{% else %}–{% endif %}</b><span>average accuracy{% if m.accuracy|length > 1 %} ({{ m.shown or "mean of all models" }}){% endif %}</span></div>
<div class="card"><b>{{ m.clients|length }}</b><span>clients, {{ m.rounds }} round{{ '' if m.rounds == 1 else 's' }}</span></div>
<div class="card"><b>{{ (0 if m.payloads_from else upload)|bytes }}</b><span>uploaded by all clients{% if m.payloads_from %}; {{ upload|bytes }} in job {{ m.payloads_from }}{% endif %}</span></div>
<div class="card"><b>{{ "{:,}".format(m.server.synthetic_images) }}</b><span>synthetic images</span></div>
{% if m.server.seconds_per_image %}
<div class="card"><b>{{ "%.3g"|format(m.server.seconds_per_image) }} s</b><span>of a worker's time, per image</span></div>
{% endif %}
{% if total_seconds %}
<div class="card"><b>{{ total_seconds|seconds }}</b><span>from start to report</span></div>
{% endif %}
</div>
{% if m.warnings %}
<h2>Warnings</h2>
<ul>{% for warning in m.warnings %}{% set text, details = warning|split_details %}<li>{{ text }}{% if details %}<details><summary>details</summary>{{ details }}</details>{% endif %}</li>{% endfor %}</ul>
<p class="note">A payload far larger or smaller than the others' is used anyway: an honest client may be an outlier, and a malicious one need not be.</p>
{% endif %}
"""
    + GAIN
    + """
{% if m.agreement %}
<h2>Label consistency of the synthetic images</h2>
{{ fold(m.agreement|length, "clients") }}
<div class="wide long"><table><tr><th>client</th><th>score</th><th>score of its weakest class</th><th style="text-align:left">suspicious, or not scored</th></tr>
{% for client, scores in m.agreement.items() %}
<tr><td>{{ client }}</td>{{ heat(100 * scores.agreement) }}{{ heat(100 * scores.classes.values()|min) }}<td class="words">{{ scores.flagged }}</td></tr>
{% endfor %}
</table></div></details>
<p class="note">The score is the share of comparisons, in percent, in which the diffusion model fits an image better with the prompt of its own class than with that of another class; chance is 50. A label-flipping client, or one whose payload corrupts the sampling, is near chance. So is an honest client if the diffusion model does not know its classes in its domain.</p>
{% endif %}
<h2>Accuracy</h2>
<div class="wide"><table><tr><th>global model</th><th>average</th><th>all images</th><th>balanced</th><th>macro-F1</th>{% if m.figures %}<th>AUROC (95 % interval)</th>{% endif %}</tr>
{% for name, row in m.accuracy.items() %}
<tr{% if name == m.shown and m.accuracy|length > 1 %} class="shown"{% endif %}><td>{{ name }}</td>{{ heat(row.average) }}{{ heat(m.over_images[name]) }}{{ heat(m.scores[name].balanced_accuracy) }}{{ heat(m.scores[name].macro_f1) }}{% if m.figures %}{% set area = m.figures.get(name, {}).get("together", {}).get("auroc") %}<td>{% if area %}{{ "%.3f (%.3f to %.3f)"|format(area.value, area.low, area.high) }}{% else %}–{% endif %}</td>{% endif %}</tr>
{% endfor %}
</table></div>
<p class="note">Top-1 accuracy in percent. The average is over clients with equal weights; the other columns are over all clients' test images. Balanced accuracy is the mean of the classes' accuracies. Every client tested the model itself, so its images did not leave it.
{% if m.config["personalization.steps"] %}{% for name, adapted in m.adapted.items() %}“{{ name }}, adapted” is not one model: each client fine-tuned its own copy of {{ name }}, for {{ m.config["personalization.steps"] }} steps on its training images. {{ adapted }} of {{ m.accuracy[name]|length - 1 }} clients reported the result, and the averages are over them{% if adapted < m.accuracy[name]|length - 1 %}; the others have a privacy guarantee, or failed{% endif %}. {% else %}Clients adapted the model to their own images if they could, but none reported the result: with an epsilon none does. {% endfor %}{% endif %}
{% if m.withheld %}<b>The sites of {{ m.withheld|join(", ") }} withhold their test results (node-config <code>test-results</code>); the averages are over the others.</b> {% endif %}
{% if m.not_tested %}<b>Not all models were tested by {{ m.not_tested|join(", ") }}; the averages are over the others.</b>{% endif %}</p>
{% if m.test_only %}
<p class="note">{% for name, row in m.test_only.items() %}<b>{{ name }} only tests</b> (node-config <code>role</code>){% if row.accuracy|length > 12 %}: {{ "%.1f"|format(row.accuracy.values()|sum / row.accuracy|length) }} % on average over {{ row.accuracy|length }} models, on {{ row.images }} test images{% elif row.accuracy %}: {% for model, value in row.accuracy.items() %}{{ model }} {{ "%.1f"|format(value) }} %{% if not loop.last %}, {% endif %}{% endfor %} on {{ row.images }} test images{% elif name in m.withheld %} and withholds its results{% else %} and reported no result{% endif %}. {% endfor %}No average includes it.</p>
{% endif %}
"""
    + VERSIONS
    + """{% if clients %}
<h2>Each client</h2>
{{ fold(clients|length, "clients") }}
<div class="wide long"><table><tr><th>client</th><th>test images</th>{% for name in columns %}<th>{{ name }}</th>{% endfor %}{% if m.shown %}<th>balanced</th><th>macro-F1</th>{% endif %}</tr>
{% for client in clients %}
<tr><td>{{ client.name }}</td><td>{{ client.images }}</td>{% for value in client.accuracy %}{% if value is none %}<td>not tested</td>{% else %}{{ heat(value) }}{% endif %}{% endfor %}{% if m.shown %}{{ heat(client.balanced_accuracy) }}{{ heat(client.macro_f1) }}{% endif %}</tr>
{% endfor %}
</table></div></details>
{% if m.shown and m.accuracy|length > 1 %}<p class="note">Balanced accuracy and macro-F1 are those of {{ m.shown }}.</p>{% endif %}
{% endif %}
"""
    + KINDS
    + """{% if m.contributions %}
<h2>Client contributions</h2>
{{ fold(m.contributions|length, "clients") }}
<div class="wide long"><table><tr><th>client</th><th>its images that the others' model confirms</th><th>gain on images like its own</th><th>gain on images like the others'</th></tr>
{% for client, contribution in m.contributions.items() %}
<tr><td>{{ client }}</td>{{ heat(contribution.seen) }}{% for gain in (contribution.own, contribution.others) %}<td>{{ "%+.1f"|format(gain.points) }} ± {{ "%.1f"|format(gain.half) }}</td>{% endfor %}</tr>
{% endfor %}
</table></div></details>
<p class="note">Leave-one-out data valuation: the model was trained again without each client, and tested on held-out synthetic images, about a fifth of each client's. First column, in percent: the share of a client's images to which the model of all others assigns the client's label, among classes that others hold, too. Gains, in percentage points: the accuracy that the client adds. For a client that permutes all labels the share may be below chance, {{ "%.3g"|format(100 / classes|length) }} %; for a client with a domain of its own it is low. Label flipping need not harm accuracy on images like the others' (a gain below zero), and two clients that flip labels in the same way can hide each other. ±: simultaneous 95 % intervals over these images; they do not cover the variation between trainings.</p>
{% endif %}
{% if by_class %}
<h2>Each class{% if m.accuracy|length > 1 %}, {{ m.shown }}{% endif %}</h2>
{{ fold(by_class|length, "classes, the weakest first") }}
<div class="wide long"><table><tr><th>class</th><th>test images</th><th>accuracy</th><th>precision</th><th>F1</th><th style="text-align:left">most often mistaken for</th></tr>
{% for row in by_class %}
<tr><td>{{ row.name }}</td><td>{{ row.images }}</td>{{ heat(row.accuracy) }}{{ heat(row.precision) }}{{ heat(row.f1) }}<td class="words">{% if row.mistaken_for %}{{ row.mistaken_for }} ({{ row.mistaken }}){% endif %}</td></tr>
{% endfor %}
</table></div></details>
{% endif %}
"""
    + CURVES_TEMPLATE
    + """{% if gallery.first %}
<h2>Synthetic images</h2>
<p class="hint">{{ swipe }}</p>
<div class="wide"><table class="cells{% if gallery.small %} small{% endif %}"><tr><th></th>{% for c in gallery.classes %}<th>{{ c }}</th>{% endfor %}</tr>
{% for client, row in gallery.first.items() %}
<tr><th>{{ client }}</th>{% for c in gallery.classes %}<td>{% if c in row %}<img alt="{{ c }}, {{ client }}" src="{{ row[c] }}">{% endif %}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
<p class="note">The first image of every class, with a row for each client whose data it replaces.{% if gallery.has_public_domains %} Rows that begin with <code>public</code> show domains that the server added by their names.{% endif %}{% if gallery.excerpt %} The table shows {{ gallery.excerpt }}; all images are in the run's folder <code>images</code>.{% endif %}</p>
{% for client, row in gallery.grid.items() %}
<details><summary>{{ client }}: up to {{ gallery.per_class }} images of each class</summary>
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
<p class="note">The most frequent confusions:</p>
<div class="wide"><table><tr><th>true</th><th style="text-align:left">predicted</th><th>images</th><th>of the class</th></tr>
{% for row in mistakes %}
<tr><td>{{ row.true }}</td><td class="words">{{ row.predicted }}</td><td>{{ row.images }}</td><td>{{ "%.0f"|format(row.share) }} %</td></tr>
{% endfor %}
</table></div>
<details><summary>The full matrix, {{ classes|length }} classes</summary>
<img class="map" alt="confusion matrix: a row for each true class, a column for each predicted one" src="{{ confusion_map }}"></details>
{% endif %}
<p class="note">Counts over all clients' test images; the shade is the share of the row.</p>
{% endif %}
{% if rounds %}
<h2>Time of each round</h2>
<div class="bars" role="img" aria-label="seconds of each round">{% for r in rounds %}<i style="--h:{{ "%.1f"|format(r.height) }}%" title="{{ r.title }}"></i>{% endfor %}</div>
<p class="note">Rounds {{ rounds[0].first }} to {{ rounds[-1].last }}; the longest bar is {{ rounds|map(attribute="seconds")|max|seconds }}{% if rounds[0].first != rounds[0].last %} per round, and each bar is the mean of several rounds{% endif %}. Accuracy is measured only at the end, because the test images stay with the clients.</p>
{% endif %}
"""
    + TIMELINE
    + """
<h2>Costs</h2>
{{ fold(m.clients|length, "clients") }}
<p class="hint">{{ swipe }}</p>
<div class="wide long"><table><tr><th>client</th><th>upload{% if m.payloads_from %} in job {{ m.payloads_from }}{% endif %}</th><th>download</th><th>images</th><th>seconds</th><th>compute</th><th>peak memory</th></tr>
{% for name, c in m.clients.items() %}
<tr><td>{{ name }}</td><td>{{ c.upload_bytes|bytes }}</td><td>{% if c.download_bytes is defined %}{{ c.download_bytes|bytes }}{% else %}–{% endif %}</td>
{% if c.seconds is defined %}<td>{{ "%.0f"|format(c.images) }}</td><td>{{ "%.1f"|format(c.seconds) }}</td><td>{{ c.flops|flops }}</td><td>{{ (c.peak_memory_mb * 1e6)|bytes }}</td>
{% elif c.epsilon or m.config["secure-sum"] and c.upload_bytes %}<td>not sent</td><td>not sent</td><td>not sent</td><td>not sent</td>
{% else %}<td>–</td><td>0</td><td>0</td><td>–</td>{% endif %}</tr>
{% endfor %}
</table></div></details>
<p class="note">Upload is the serialized payload{% if m.payloads_from %}, which was sent in job {{ m.payloads_from }}, as images, seconds, compute and memory are of that job{% endif %}. Download is the parts of the kit that the client needs, and the global models. Server:
{{ "%.1f"|format(m.server.synthesis_seconds) }} s of synthesis, summed over the work units, which may run in parallel{% for name, s in m.server.training_seconds.items() %}, {{ "%.1f"|format(s) }} s of training {{ name }}{% if name in m.server.trained_images %} on {{ "{:,}".format(m.server.trained_images[name]) }} images{% endif %}{% endfor %}{% if m.server.peak_memory_mb %}, {{ (m.server.peak_memory_mb * 1e6)|bytes }} of peak memory{% endif %}.</p>
{% if m.sends %}
<h2>What left the clients</h2>
<p class="note">{% if m.payloads_from %}In this run no client sent a payload. In job <code>{{ m.payloads_from }}</code> each had sent {{ m.sends }}.{% else %}Each client sent {{ m.sends }}.{% endif %} {% if m.epsilons and m.epsilons[0] > 0 %}Without the protection by differential privacy, it would reveal{% else %}It reveals{% endif %} {{ m.reveals }}.
{% if m.epsilons and m.epsilons[0] > 0 %}{% if m.config["secure-sum"] %}The sum is, if no client leaves out its noise,{% else %}It is{% endif %} differentially private for the replacement of one image, with ε = {{ "%g"|format(m.epsilons[0]) }}{% if m.epsilons|length > 1 %} to {{ "%g"|format(m.epsilons[-1]) }}{% endif %}{% if m.delta %} and δ = {{ "%g"|format(m.delta) }}{% endif %}. The guarantee does not cover which classes a client sends{% if m.delta %}, nor how many images of each it has{% endif %}, nor whether and when it answers or fails.
{% else %}There is no guarantee of differential privacy{% if m.epsilons and m.epsilons[-1] > 0 %} for some clients{% endif %}.
{% endif %}Beside it, and without a guarantee, each sent {% if (not m.epsilons or m.epsilons[0] == 0) and not m.config["secure-sum"] %}its costs, and {% endif %}the confusion matrix{% if m.figures %} and score histograms{% endif %} of its own test images{% if m.withheld %} (except for the sites that withhold it){% endif %}{% if m.adapted %}, also for the model that it adapted to its training images{% endif %}{% if m.gain %}, also for a model that it trained alone, with the number of images that either model classifies correctly{% endif %}.{% if m.test_only %} Test-only clients sent no more than this of the global models.{% endif %}
 A client can run <code>osfl audit</code> to measure by membership-inference attacks what its payload reveals about its images.</p>
{% endif %}
<h2>Reproduction</h2>
<p class="note">{{ m.platform }}{% if m.kit_sha256 %} · kit <code>{{ m.kits|join(", ") }}</code>, sha256 <code>{{ m.kit_sha256[:16] }}</code>{% endif %}</p>
<p class="hint">{{ swipe }}</p>
<div class="wide"><table><tr>{% for p in m.versions %}<th style="text-align:left">{{ p }}</th>{% endfor %}</tr><tr>{% for v in m.versions.values() %}<td style="text-align:left">{{ v }}</td>{% endfor %}</tr></table></div>
<details><summary>Resolved configuration</summary><div class="wide long"><table>{% for key, value in m.config.items() %}<tr><td><code>{{ key }}</code></td><td><code>{{ value }}</code></td></tr>{% endfor %}</table></div></details>
</body></html>
"""
)
