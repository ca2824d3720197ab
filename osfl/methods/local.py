"""local: each client's own classifier, without a federation."""

from osfl.methods.declaration import Method
from osfl.methods.sent_classifier import REVEALS, SENDS, guarantee_problem

METHOD = Method(
    client="classifier",
    server="local",
    payload="Classifier",
    sends=SENDS,
    reveals=REVEALS,
    samples=False,
    privacy="approximate",
    global_model=False,
    guarantee_problem=guarantee_problem,
)
