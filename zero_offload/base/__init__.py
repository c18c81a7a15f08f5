"""Words and values that every layer shares: settings, errors, dtypes, events. No I/O, no device."""
