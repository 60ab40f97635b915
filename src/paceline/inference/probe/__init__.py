"""Questions to the features of a frozen model: are labels learnable, wrong, duplicated, too few, or out of place?"""
