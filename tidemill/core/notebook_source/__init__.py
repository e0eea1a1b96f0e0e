"""Source of functions that stand in no importable file, such as a notebook's.

Other processes import what they run, so such a function has to be written to a file first.
"""
