"""Programs for who works on this repository; not part of the package."""
