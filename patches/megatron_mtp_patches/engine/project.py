"""The project that applies patches, and the library that it patches, as messages name them."""

from __future__ import annotations

from .declare import PullRequest


class Project:
    """The engine's description of the project that uses it.

    Args:
        package: the project's own package; its command and its environment variables have the same name.
        library: the library that it patches, as users call it.
        library_package: the package that the library is imported as.
        repository: the library's owner and name on GitHub.
        optional_parts: packages of the library that not every installation has.
    """

    def __init__(
        self, package: str, library: str, library_package: str, repository: str, optional_parts: tuple[str, ...] = ()
    ) -> None:
        self.package = package
        self.library = library
        self.library_package = library_package
        self.repository = repository
        self.optional_parts = optional_parts
        self.command = package.replace("_", "-")
        self.choice_variable = package.upper()  # selects patches
        self.drift_variable = f"{self.choice_variable}_ON_DRIFT"  # decides what a refused patch does

    def display_name(self, package: str) -> str:
        """The name by which users know a top-level package."""
        return self.library if package == self.library_package else package

    def is_optional(self, module: str) -> bool:
        """True if a module is in a part that not every installation has."""
        return any(module.startswith(f"{part}.") for part in self.optional_parts)

    def pull_request_url(self, change: PullRequest) -> str:
        """The address of an upstream change."""
        return f"https://github.com/{change.repository or self.repository}/pull/{change.number}"
