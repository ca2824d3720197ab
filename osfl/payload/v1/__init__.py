"""Generated from proto/osfl/payload/v1 by `make proto`."""
