"""Let a published site load its scripts from itself instead of from content delivery networks.

    python offline.py [html]

asv's page names jquery, flot, bootstrap and others on such networks; without them it draws nothing.
The same versions come from the npm registry (needs npm) into html/vendor.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

FILES = {
    "jquery-3.3.1.min.js": "jquery@3.3.1/dist/jquery.min.js",
    "jquery.flot.min.js": "flot@0.8.3/jquery.flot.js",
    "jquery.flot.time.min.js": "flot@0.8.3/jquery.flot.time.js",
    "jquery.flot.selection.min.js": "flot@0.8.3/jquery.flot.selection.js",
    "jquery.flot.categories.min.js": "flot@0.8.3/jquery.flot.categories.js",
    "jquery.flot.orderBars.js": "flot-orderbars@1.0.0/js/jquery.flot.orderBars.js",
    "stupidtable.min.js": "stupid-table-plugin@1.1.3/stupidtable.min.js",
    "md5.min.js": "blueimp-md5@2.19.0/js/md5.min.js",
    "bootstrap.min.js": "bootstrap@3.1.1/dist/js/bootstrap.min.js",
    "bootstrap.min.css": "bootstrap@3.1.1/dist/css/bootstrap.min.css",
}
"""Of each file that the page loads, the package, its version, and the file in it."""

TAG = re.compile(r'(src|href)="https://[^"]*/([^"/]+\.(?:js|css))"[^>]*>')


def rewrite(page):
    """Return the page with local scripts; fail on one that is not known."""

    def local(match):
        attribute, name = match.groups()
        if name not in FILES:
            sys.exit(f"asv's page loads {name}, which offline.py does not know; add it to FILES")
        return f'{attribute}="vendor/{name}">'

    return TAG.sub(local, page)


def main():
    """Run the command."""
    site = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "html")
    index = site / "index.html"
    page = rewrite(index.read_text(encoding="utf-8"))
    vendor = site / "vendor"
    vendor.mkdir(exist_ok=True)
    packages = sorted({source.partition("/")[0] for source in FILES.values()})
    with tempfile.TemporaryDirectory() as folder:
        npm = ("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder)
        subprocess.run([*npm, *packages], check=True, stdout=subprocess.DEVNULL)
        for name, source in FILES.items():
            package, _, path = source.partition("/")
            held = pathlib.Path(folder, "node_modules", package.partition("@")[0], path)
            shutil.copyfile(held, vendor / name)
    index.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
