"""Watch training scripts that paceline did not write: where each second of their steps goes, on every rank."""
