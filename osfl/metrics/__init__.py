"""Figures of a test: discrimination and calibration, from counts that name no image."""

# Keys of the estimates in `figures.figures_of` that every summary shows
SCORE_FIGURES = ("auroc", "sensitivity", "ece", "brier")
