"""Exit codes of the `osfl` command that programs act on."""

# A temporary failure, after which a retry may succeed: EX_TEMPFAIL of sysexits.h
TRY_AGAIN = 75
