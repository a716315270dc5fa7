"""The tutorials' commands do what the pages say: each page's blocks of shell, in its order, by a volume of their own."""

import os
import re

import fslib
from fslib import run
from mount_tests.common import check, daemon_only, must
from mount_tests.helpers import small_volume

PAGES = "first-volume", "tenants"


def blocks(page):
    text = (fslib.ROOT / "docs" / "tutorials" / f"{page}.md").read_text()
    return re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)


@check
def tutorials_run(volume, _top):
    daemon_only(volume)
    with small_volume(volume) as v:
        place = v.image.with_suffix(".tutorial")
        place.mkdir()
        env = {**os.environ, "PATH": f"{v.binary.parent}:{os.environ['PATH']}"}
        try:
            for page in PAGES:
                found = blocks(page)
                must(len(found) > 2, f"{page} has no commands")
                for block in found:
                    run("bash", "-euo", "pipefail", "-c", block, cwd=place, env=env)
        finally:
            run("umount", "-l", place / "mnt", ok=None)
            run("rm", "-rf", "--one-file-system", place)
