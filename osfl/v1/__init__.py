"""Generated from proto/osfl/v1 by `make proto`."""
