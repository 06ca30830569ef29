"""Expressions that are not the field's terms. No output, page or docstring has them; this is the only list."""

import re

RETIRED = re.compile(
    # Coinages: GPU activity, CUDA runtime API call, self time, recomputed, roofline, annotation, call tree.
    r"pieces? of (?:GPU )?work|\d pieces\b|calls? of the driver|\bown time\b|computed again|\bits roof\b"
    r"|not launched yet|whole or not at all|dispatch chain|\b(?:the|a) label\b|\basked by\b|\bspoken of\b"
    # A trace shows or records something; it does not tell, and no one is told.
    r"|\b(?:cannot|not to) be told\b|\bis not told\b|\bnot told\b|\bset against\b|\bsets each trace against\b"
    r"|typed by hand|and waited\b|which has none|as after a pause|first use\b(?! of)|nothing (?:computed )?beside"
    r"|nobody (?:loses|waits|is told)|worth a word|is no news|costs? it nothing|\bfor want of\b"
)
