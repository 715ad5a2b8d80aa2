"""The project that applies patches, and the library that it patches, as messages name them."""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False  # as in declare.py
if TYPE_CHECKING:
    from .declare import PullRequest


@dataclass(frozen=True)
class Project:
    """What the engine is told about the project that uses it.

    Attributes:
        package: the project's own package; its command and its environment variables have the same name.
        library: the library that it patches, as users call it.
        library_package: the package that the library is imported as.
        repository: the library's owner and name on GitHub.
    """

    package: str
    library: str
    library_package: str
    repository: str

    @property
    def command(self) -> str:
        """The command that users run."""
        return self.package.replace("_", "-")

    @property
    def choice_variable(self) -> str:
        """The environment variable that selects patches."""
        return self.package.upper()

    @property
    def drift_variable(self) -> str:
        """The environment variable that says what a refused patch does."""
        return f"{self.choice_variable}_ON_DRIFT"

    def name_of(self, package: str) -> str:
        """How users call a top-level package."""
        return self.library if package == self.library_package else package

    def url_of(self, change: PullRequest) -> str:
        """Where an upstream change can be read."""
        return f"https://github.com/{change.repository or self.repository}/pull/{change.number}"
