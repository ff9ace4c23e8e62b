"""In place of MLPerf's logger: prints events as lines of JSON."""
