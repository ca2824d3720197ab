"""Parts of the report's jinja2 template: the clients' gains, kinds of payload, and the timeline."""

GAIN = """
{% if m.gain %}
<h2>What each client gained</h2>
{{ fold(m.gain.clients|length, "clients") }}
<p class="hint">{{ swipe }}</p>
<div class="wide long"><table><tr><th>client</th><th>test images</th><th>local only</th><th>global, {{ m.gain.model }}</th>{% if personalizes %}<th>personalized</th>{% endif %}<th>gain, 95 % interval</th></tr>
{% for name, row in gain_rows.items() %}
<tr{% if loop.last %} class="shown"{% endif %}><td>{{ name }}</td><td>{{ row.images }}</td>{{ heat(row.local) }}{{ heat(row.global) }}{% if personalizes %}{{ heat(row.personalized) }}{% endif %}<td>{{ row|interval }}</td></tr>
{% endfor %}
</table></div></details>
<p class="note">Accuracy in percent on each client's own test images. Local only: a model that the client trained alone, by the global model's recipe on its own training images, and of which it sent nothing but these figures. Gain: global minus local only, in percentage points, paired by image (Bonett and Price's interval); the average is over clients with equal weights. The intervals cover the choice of test images, not the variation between trainings.</p>
{% elif m.config["local-baseline"] %}
<h2>What each client gained</h2>
<p class="note">No client reported a model that it trained alone (<code>local-baseline</code>): with an epsilon none does, sites may withhold test results, and a failure is in the server's log.</p>
{% endif %}
"""

TIMELINE_STYLE = """
.lane { display:grid; grid-template-columns:minmax(8rem,16rem) 6rem 1fr; gap:.2rem .8rem;
  align-items:center; padding:.22rem 0; border-bottom:1px solid var(--line) }
.lane b { font-weight:400 } .lane .span { text-align:right; color:var(--soft);
  font-variant-numeric:tabular-nums; font-size:.88rem; white-space:nowrap }
.track { position:relative; height:.8rem; background:var(--card); border-radius:3px }
.track i { position:absolute; top:0; height:100%; left:var(--x); width:var(--w); min-width:2px;
  border-radius:3px; background:var(--bar) }
.track i.work,.key i.work { background:#2a8a63 } .track i.test,.key i.test { background:#b7791f }
.track i.mark,.track i.bad { width:3px; min-width:3px; margin-left:-1px; border-radius:0;
  background:var(--ink) } .track i.bad,.key i.bad { background:#c9372c }
.key { display:flex; flex-wrap:wrap; gap:.2rem 1.1rem; color:var(--soft); font-size:.85rem }
.key i { display:inline-block; width:.8rem; height:.8rem; border-radius:3px; margin-right:.35rem;
  vertical-align:-.08rem; background:var(--bar) } .key i.mark { width:3px; background:var(--ink) }
.axis { color:var(--soft); font-size:.8rem; border:0 } .axis div { display:flex;
  justify-content:space-between }
@media (max-width:40rem) { .lane { grid-template-columns:1fr auto }
  .lane .track,.axis div { grid-column:1 / -1 } .axis span { display:none }
  .axis div span { display:inline } }
"""

TIMELINE = """
{% macro lane(row) %}
<div class="lane"><b>{{ row.name }}</b><span class="span">{% if row.seconds is not none %}{{ row.seconds|seconds }}{% endif %}</span><div class="track">{% for bar in row.bars %}<i class="{{ bar.kind }}" style="--x:{{ "%.2f"|format(bar.left) }}%;--w:{{ "%.2f"|format(bar.width) }}%" title="{{ bar.text }}"></i>{% endfor %}</div></div>
{% endmacro %}
{% macro axis() %}
<div class="lane axis"><span></span><span></span><div><span>0</span><span>{{ (m.timeline.seconds / 2)|seconds }}</span><span>{{ m.timeline.seconds|seconds }}</span></div></div>
{% endmacro %}
{% if lanes.phases %}
<h2>Timeline</h2>
{% for row in lanes.phases %}{{ lane(row) }}{% endfor %}
{{ axis() }}
{% if lanes.clients %}
{{ fold(lanes.clients|length, "clients") }}
{% for row in lanes.clients %}{{ lane(row) }}{% endfor %}
{{ axis() }}
<p class="key"><span><i class="mark"></i>joined, payload arrived</span>{% if "work" in lane_kinds %}<span><i class="work"></i>asked, until the payload arrived</span>{% endif %}<span><i class="test"></i>tests</span>{% if "bad" in lane_kinds %}<span><i class="bad"></i>failed, refused</span>{% endif %}</p>
</details>
{% endif %}
<p class="note">Measured by the server's clock, since its last start for this job. A client's time is that of its payload, with its upload; its tests, with any training for them, last from the beginning of that phase to the arrival of its last result.</p>
{% endif %}
"""

KINDS = """
{% if m.kinds %}
<h2>Kinds of payload</h2>
<p class="hint">{{ swipe }}</p>
<div class="wide"><table><tr><th>kind</th><th style="text-align:left">clients</th><th>upload</th><th>synthetic images</th><th>{{ m.shown }} on these clients</th>{% if m.contributions %}<th>mean gain on images like the others'</th>{% endif %}</tr>
{% for row in m.kinds %}
<tr><td>{{ row.kind }}</td><td class="words">{{ row.clients|join(", ") }}</td><td>{{ row.upload_bytes|bytes }}</td><td>{{ "{:,}".format(row.images) }}</td>{{ heat(row.accuracy) }}{% if m.contributions %}<td>{% if row.others is none %}–{% else %}{{ "%+.1f"|format(row.others) }}{% endif %}</td>{% endif %}</tr>
{% endfor %}
</table></div>
<p class="note">Each client sent one kind of payload. One model was trained on the images of all kinds. Accuracy is the mean over the kind's clients, in percent; clients differ in their images, too.</p>
{% endif %}
"""

VERSIONS_STYLE = """
.plot rect.carried,.plot rect.new { fill:var(--bar); stroke:none } .plot rect.new { fill:#2a8a63 }
.legend i.carried { border-color:var(--bar) } .legend i.new { border-color:#2a8a63 }
"""

VERSIONS = """
{% if model_versions %}
<h2>Versions</h2>
<div class="plots">{{ versions_plot }}{{ payloads_plot }}</div>
<p class="legend"><span><i></i>average</span>{% for name, color in versions_legend.items() %}<span><i style="border-color:{{ color }}"></i>{{ name }}</span>{% endfor %}<span><i class="carried"></i>payloads of the version before</span><span><i class="new"></i>new payloads</span></p>
<p class="hint">{{ swipe }}</p>
<div class="wide long"><table><tr><th>version</th><th>accuracy</th><th>payloads</th><th>new</th><th>forgotten</th><th>finished (UTC)</th><th style="text-align:left">training</th><th style="text-align:left">job</th></tr>
{% for row in model_versions|reverse %}
<tr{% if loop.first %} class="shown"{% endif %}><td>{{ row.number }}</td>{% if row.finished is defined %}{{ heat(row.average) }}<td>{{ row.carried + row.new }}</td><td>{{ row.new }}</td><td>{{ row.forgotten }}</td><td>{{ row.finished[:16]|replace("T", " ") }}</td><td class="words">{{ "from the earlier model" if row.from_model else "anew" }}</td>{% else %}<td class="words" colspan="6">its folder has no results</td>{% endif %}<td class="words"><code>{{ row.job }}</code></td></tr>
{% endfor %}
</table></div>
<p class="note">Accuracy, in percent, of each version's main model on the test images of the clients that tested it; the clients differ between versions, so compare a client's line with itself.{% if versions_unplotted %} The plot omits {{ versions_unplotted }} clients.{% endif %} Forgotten: clients that this version has forgotten since.</p>
{% endif %}
"""
