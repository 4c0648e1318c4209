"""Self-contained HTML pages: charts as inline SVG, tables, and the file they are written to.

Shared by reports of simulations and of plans. Imports no other part of the package but its errors.
"""
