"""Words of our own that the field does not use."""

import re

RETIRED = re.compile(
    r"pieces? of GPU work|calls? of the driver|own time|computed again|its roof|not launched yet"
    r"|whole or not at all|dispatch chain|\bthe label\b"
)
