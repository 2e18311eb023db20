create table users (
  id       bigint generated always as identity primary key,
  email    text not null,
  welcomed boolean not null default false
);
