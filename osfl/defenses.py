"""Modules of the defenses against malicious clients, by the value of the key `defense`.

To add a defense, write a module in server_app/defenses (filters.py there says which functions it
must have), and name it here.
"""

LABEL_CONSISTENCY = "server_app.defenses.label_consistency"
DEFENSES = {"label-consistency": LABEL_CONSISTENCY, "label-consistency-report": LABEL_CONSISTENCY}
