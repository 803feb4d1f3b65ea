"""Keys and values quantised as they arrive: statistics, coefficient choice, caches along the head and along time."""
