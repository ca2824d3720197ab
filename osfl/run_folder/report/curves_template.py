"""The section of `report.html` on ROC curves and calibration."""

CURVES_STYLE = """
.plots { display:flex; flex-wrap:wrap; gap:.6rem 2rem; margin-top:.6rem }
.plot { flex:1 1 15rem; max-width:26rem } .plot text { fill:var(--soft); font-size:12px }
.plot rect,.plot path.even { fill:none; stroke:var(--line) }
.plot path.even { stroke:var(--soft); stroke-dasharray:4 4 }
.plot polyline { fill:none; stroke-width:1.4 } .plot circle { fill:var(--paper) }
.plot .all { stroke:var(--ink) } .plot polyline.all { stroke-width:2.6 }
.legend span { display:inline-block; margin-right:.9rem; color:var(--soft); font-size:.85rem }
.legend i { display:inline-block; width:1.1rem; margin-right:.35rem; vertical-align:middle;
  border-top:3px solid var(--ink) }
"""

CURVES_TEMPLATE = """
{% macro interval(figure, scale, form) %}
{% if figure is none %}<td>–</td>{% else %}<td>{{ form|format(scale * figure.value) }} <small>({{ form|format(scale * figure.low) }} to {{ form|format(scale * figure.high) }})</small></td>{% endif %}
{% endmacro %}
{% if curves %}
<h2>ROC and calibration</h2>
{% for curve in curves %}
<details{% if loop.first %} open{% endif %}><summary>{{ curve.name }}</summary>
<div class="plots">{{ curve.roc }}{{ curve.reliability }}</div>
<p class="legend"><span><i></i>{{ curve.senders }}</span>{% for name, color in curve.legend.items() %}<span><i style="border-color:{{ color }}"></i>{{ name }}</span>{% endfor %}</p>
<p class="hint">{{ swipe }}</p>
<div class="wide long"><table><tr><th>test images of</th><th>images</th><th>AUROC</th><th>sensitivity, %</th><th>ECE, %</th><th>Brier score</th></tr>
{% for row in curve.rows %}
<tr{% if loop.first %} class="shown"{% endif %}><td>{{ row.name }}</td><td>{{ row.images }}</td>{{ interval(row.auroc, 1, "%.3f") }}{{ interval(row.sensitivity, 100, "%.0f") }}{{ interval(row.ece, 100, "%.1f") }}{{ interval(row.brier, 1, "%.3f") }}</tr>
{% endfor %}
</table></div>
<details{% if curve.classes|length <= most_open and loop.first %} open{% endif %}><summary>{{ curve.classes|length }} classes, {{ curve.senders }} together</summary>
<div class="wide long"><table><tr><th>class</th><th>AUROC</th><th>sensitivity, %</th></tr>
{% for row in curve.classes %}
<tr><td>{{ row.name }}</td>{{ interval(row.auroc, 1, "%.3f") }}{{ interval(row.sensitivity, 100, "%.0f") }}</tr>
{% endfor %}
</table></div></details>
<p class="note">{% if curve.unplotted %}The plots omit {{ curve.unplotted }} clients. {% endif %}{% if curve.positive %}The ROC curves are those of {{ curve.positive }}. {% endif %}The histograms' bins change the AUROC of {{ curve.name }} by at most {{ "%.4f"|format(curve.bound) }}.</p>
</details>
{% endfor %}
<p class="note">From histograms of each client's scores; clients without them are left out, and so are a client's classes with too few test images. AUROC, of each class against the others, is the mean over the classes, and so is the sensitivity at {{ "%g"|format(100 * curves[0].rows[0].specificity) }} % specificity. ECE, the expected calibration error, is the mean distance between confidence and accuracy in 15 bins; in the diagram, points below the diagonal are overconfident, and bins of fewer than {{ curves[0].least }} images are omitted. The Brier score is from 0 (best) to 2. In brackets: 95 % intervals over these images. That of a mean over classes is wider than necessary, because histograms do not tell how the errors of classes correlate.</p>
{% endif %}
"""
