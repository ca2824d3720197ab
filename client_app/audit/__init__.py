"""`osfl audit`: membership-inference attacks on a client's payload.

They measure how well a receiver of the payload can tell whose images made it. The audit runs where
the images are. Only numbers leave it.
"""
