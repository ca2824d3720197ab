#!/bin/sh
# Create the keys and certificates of the federation in docker-compose.yml, each in the volume of its owner. Valid ones are kept.
set -eu
umask 077
[ -f /keys/ca.crt ] || osfl certs ca /keys
[ -f /keys/server.pem ] && osfl certs show /keys >/dev/null || osfl certs server /keys --host superlink --host control

# give FILE DESTINATION
give() {
  install -T -D -o 10001 -g 10001 -m 600 "$1" "$2"
}

for volume in /to/*; do
  chown 10001:10001 "$volume"
  chmod 700 "$volume"
  give /keys/ca.crt "$volume/ca.crt"
done
# For runs with sealing-key=/data/sealing.key
[ -f /keys/sealing.key ] || osfl certs sealing /keys
give /keys/sealing.key /to/server/sealing.key
give /keys/server.pem /to/superlink/server.pem
give /keys/server.key /to/superlink/server.key
for volume in /to/client-*; do
  name=$(basename "$volume")
  [ -f "/keys/nodes/$name" ] || osfl certs node /keys "$name"
  give "/keys/nodes/$name" "$volume/node.key"
  give "/keys/nodes/$name.pub" "/to/operator/nodes/$name.pub"
done
chown -h 10001:10001 /to/operator/nodes
give /deploy/flower.toml /to/operator/config.toml
