"""One run from beginning to end: its recipe, its parts, its folder, its report."""
