"""`osfl audit`: how well somebody who sees a payload can tell whose images made it.

It runs where the images are. Only numbers leave it.
"""
