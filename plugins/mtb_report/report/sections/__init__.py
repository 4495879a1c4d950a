"""The sections of a report, each in a module of its own: from named records to blocks, or None where there is nothing."""
