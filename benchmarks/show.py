"""Prints the rows of a benchmark as a table."""

from cli.units import mib, si


def print_rows(rows, format_row):
    """Yield the rows, and print each one as soon as it has been measured."""
    for row in rows:
        print(format_row(row), flush=True)
        yield row


def ceiling_line(row):
    return f"  {row['what']:<44}{si(row['value'], row['unit']):>16}"


def table_line():
    """Return a function that formats a row as a line of a table.

    At the first row the function also writes a line of titles and fixes the widths of the columns.
    """
    widths = {}

    def format_row(row):
        cells = {key: cell(key, value) for key, value in row.items()}
        first = not widths
        if first:
            least = {k: {str: 16, list: 18}.get(type(value), 8) for k, value in row.items()}
            widths.update({k: max(least[k], len(k), len(text)) + 2 for k, text in cells.items()})
        lines = [{key: key for key in cells}, cells] if first else [cells]
        return "\n".join(
            "".join(texts[k].ljust(w) if isinstance(row[k], str) else texts[k].rjust(w) for k, w in widths.items())
            for texts in lines
        ).rstrip()

    return format_row


FORMATS = {  # ending of a key -> how its figure is written
    "tokens_per_s": "{:,.0f}".format, "bytes_per_s": lambda x: si(x, "B/s"), "_bytes": mib, "_s": "{:.4g}".format,
    "seconds": "{:.4g}".format, "ratio": "{:.3f}".format, "mfu": "{:.1%}".format, "mbu": "{:.1%}".format,
}  # fmt: skip


def cell(key, value):
    """Return a figure as text, in the unit that its key names."""
    if value is None or isinstance(value, (str, bool)):
        return {None: "-", True: "yes", False: "no"}.get(value, value)
    if isinstance(value, list):
        return "..".join(f"{x:.3g}" for x in value)
    return next((write(value) for ending, write in FORMATS.items() if key.endswith(ending)), f"{value:,}")
