package stmt

const WritePresence = `
select 1 from onceq.be_present($1::bigint, $2::text, $3::int, $4::text, $5::int, $6::bigint, $7::text::jsonb, $8::text[], $9::text::jsonb, $10::text::jsonb, $11::text) w`
