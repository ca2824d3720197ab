#!/bin/sh
# Make the nodes' public keys known to the SuperLink. Flower's answer, with the node's id, is kept beside the key: who has one is done.
set -eu
for key in /data/nodes/*.pub; do
  answer=${key%.pub}.json
  if [ ! -s "$answer" ]; then
    flwr supernode register "$key" federation --format json >"$answer.new"
    cat "$answer.new"
    grep -q '"node-id"' "$answer.new"
    mv "$answer.new" "$answer"
  fi
done
