"""Model bundles (*kits*): find, fetch, check, and hash them."""
