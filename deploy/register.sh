#!/bin/sh
# register.sh FOLDER: register the public keys FOLDER/*.pub with the SuperLink. Flower's answers, with the nodes' ids, are kept in /data/registered with the key: nodes that have one are skipped.
set -eu
mkdir -p /data/registered
for key in "$1"/*.pub; do
  name=$(basename "$key" .pub)
  answer=/data/registered/$name.json
  if [ ! -s "$answer" ] || ! cmp -s "$key" "/data/registered/$name.pub"; then
    flwr supernode register "$key" federation --name "$name" --format json >"$answer.new"
    cat "$answer.new"
    # "already in use": an earlier registration was interrupted
    grep -qe '"node-id"' -e 'already in use' "$answer.new"
    cp "$key" "/data/registered/$name.pub"
    mv "$answer.new" "$answer"
  fi
done
