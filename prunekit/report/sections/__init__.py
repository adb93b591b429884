"""The sections of a run's page: each is a class that registers itself here, beside its part of the template."""

from prunekit.report.sections.registry import SECTIONS, Section, register_section

__all__ = ["SECTIONS", "Section", "register_section"]
