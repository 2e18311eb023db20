-- name: CreateUser :one
insert into users (email) values ($1)
returning *;

-- name: SetWelcomed :exec
update users set welcomed = true
 where id = $1;
