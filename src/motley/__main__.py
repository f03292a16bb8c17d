"""`python -m motley`: the command line."""

from motley.cli import app

if __name__ == "__main__":
    app(prog_name="motley")
