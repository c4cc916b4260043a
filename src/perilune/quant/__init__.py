"""Weight formats: codecs to the bit, and the containers that keep a weight in its stored form."""
