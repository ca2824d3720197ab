#!/bin/sh
# register.sh FOLDER: make the public keys FOLDER/*.pub known to the SuperLink. Flower's answers, with the nodes' ids, are kept in /data/nodes: who has one is done.
set -eu
mkdir -p /data/nodes
for key in "$1"/*.pub; do
  answer=/data/nodes/$(basename "$key" .pub).json
  if [ ! -s "$answer" ]; then
    flwr supernode register "$key" federation --format json >"$answer.new"
    cat "$answer.new"
    grep -qe '"node-id"' -e 'already in use' "$answer.new" # the latter: this was broken off before
    mv "$answer.new" "$answer"
  fi
done
