"""Claims of pages whose code has changed since their commit: `make claims` prints them.

A claim of a commit that the checkout does not have is named as such: a shallow clone has few.
"""

from __future__ import annotations

import subprocess

from docs.extensions.claims import ROOT, Claim, load


def git(*words: str) -> str | None:
    """Lines that git prints; None where it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def has_commit(commit: str) -> bool:
    return git("cat-file", "-e", f"{commit}^{{commit}}") is not None


def age(claim: Claim) -> str:
    """Changes of the claim's code since its commit; empty where there are none."""
    if not has_commit(claim.commit):
        return "this checkout does not have the commit"
    changes = (git("log", "--oneline", f"{claim.commit}..HEAD", "--", *claim.paths) or "").splitlines()
    return f"{len(changes)} commits since, the last: {changes[0]}" if changes else ""


def main() -> None:
    claims = load()
    old = {name: found for name, claim in claims.items() if (found := age(claim))}
    for name, found in old.items():
        claim = claims[name]
        print(f"{name}: {claim.kind} {claim.date} at {claim.commit}; {found}\n    again: {claim.script}")
    print(f"{len(old)} of {len(claims)} claims are about code that has changed, or is not known here")


if __name__ == "__main__":
    main()
