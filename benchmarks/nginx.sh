#!/bin/sh
# nginx as a peer of benchmarks/gateway_relay.py: nginx.sh PORT SOCKET passes what comes to PORT on to SOCKET.
folder=$(mktemp -d)
cat >"$folder/nginx.conf" <<END
$([ "$(id -u)" -ne 0 ] || echo "user root;")
worker_processes 1; daemon off; pid $folder/pid; error_log $folder/errors;
events { worker_connections 4096; }
http {
  access_log off; tcp_nodelay on; keepalive_requests 100000000; client_body_temp_path $folder/body;
  proxy_temp_path $folder/proxy; fastcgi_temp_path $folder/f; uwsgi_temp_path $folder/u; scgi_temp_path $folder/s;
  upstream engine { server unix:$2; keepalive 512; keepalive_requests 100000000; }
  server {
    listen 127.0.0.1:$1 backlog=1024;
    location / { proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }
  }
}
END
exec nginx -c "$folder/nginx.conf"
