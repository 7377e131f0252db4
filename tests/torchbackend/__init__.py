"""Programs with torch's own features, each run on gloo and on asynccoll: `python -m tests.torchbackend.scenarios`."""
