"""What: the parts of tools/wheel that look into a wheel: its glibc floor, its names, its record.
Why: a wheel's tag is a promise to systems that nobody here has; each part keeps one piece of it.
Never: used by the library or its build.
"""
