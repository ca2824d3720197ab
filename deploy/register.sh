#!/bin/sh
# register.sh FOLDER: make the public keys FOLDER/*.pub known to the SuperLink. Flower's answers, with the nodes' ids, are kept in /data/registered with the key: who has one is done.
set -eu
mkdir -p /data/registered
for key in "$1"/*.pub; do
  name=$(basename "$key" .pub)
  answer=/data/registered/$name.json
  if [ ! -s "$answer" ] || ! cmp -s "$key" "/data/registered/$name.pub"; then
    flwr supernode register "$key" federation --name "$name" --format json >"$answer.new"
    cat "$answer.new"
    grep -qe '"node-id"' -e 'already in use' "$answer.new" # the latter: this was broken off before
    cp "$key" "/data/registered/$name.pub"
    mv "$answer.new" "$answer"
  fi
done
