//! Answer to one query (RFC 1035, EDNS by RFC 6891, negative answers by RFC 2308).

use std::net::IpAddr;

use hickory_resolver::proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_resolver::proto::rr::rdata::SOA;
use hickory_resolver::proto::rr::{DNSClass, Name, RData, Record, RecordType};

use super::names::{Known, Names};

/// Time in seconds for which clients may keep an answer: a reload can change it.
const TTL: u32 = 30;
/// Limit of an answer over UDP, which every path carries unfragmented (DNS flag day 2020).
pub(super) const UDP_BYTES_MAX: u16 = 1232;
const HEADER_BYTES: usize = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Udp,
    Tcp,
}

/// Returns the answer; none to a message that is not a query, which might be an answer to us.
pub(super) fn answer(names: &Names, bytes: &[u8], transport: Transport) -> Option<Vec<u8>> {
    let Ok(query) = Message::from_vec(bytes) else {
        let [first, second, flags, ..] = *bytes else {
            return None;
        };
        let is_query = flags & 0x80 == 0 && bytes.len() >= HEADER_BYTES;
        let id = u16::from_be_bytes([first, second]);
        let error = || Message::error_msg(id, OpCode::Query, ResponseCode::FormErr);
        return is_query.then(error)?.to_vec().ok();
    };
    let metadata = &query.metadata;
    if metadata.message_type != MessageType::Query {
        return None;
    }
    let mut message = Message::response(metadata.id, metadata.op_code);
    message.metadata.recursion_desired = metadata.recursion_desired;
    message.metadata.response_code = match (&query.queries[..], metadata.op_code) {
        (_, op_code) if op_code != OpCode::Query => ResponseCode::NotImp,
        ([question], _) => {
            message.add_query(question.clone());
            if query.edns.as_ref().is_some_and(|edns| edns.version() > 0) {
                ResponseCode::BADVERS
            } else {
                resolve(names, question, &mut message)
            }
        }
        _ => ResponseCode::FormErr,
    };
    if query.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(UDP_BYTES_MAX);
        message.set_edns(edns);
    }
    let encoded = message.to_vec().ok()?;
    let limit = usize::from(query.max_payload().min(UDP_BYTES_MAX));
    if transport == Transport::Udp && encoded.len() > limit {
        return message.truncate().to_vec().ok();
    }
    Some(encoded)
}

/// Returns a refusal without question and EDNS, which is no larger than the query; none to a
/// message that is not a query.
pub(super) fn refuse(bytes: &[u8]) -> Option<Vec<u8>> {
    let header: [u8; HEADER_BYTES] = bytes.get(..HEADER_BYTES)?.try_into().ok()?;
    let [first, second, flags, ..] = header;
    let is_query = flags & 0x80 == 0;
    let mut refusal = [0; HEADER_BYTES];
    // The operation and the desire for recursion are repeated.
    refusal[..3].copy_from_slice(&[first, second, 0x80 | flags & 0x79]);
    refusal[3] = ResponseCode::Refused.low();
    is_query.then(|| refusal.to_vec())
}

/// Adds the records of a name, and returns the code.
fn resolve(names: &Names, question: &Query, message: &mut Message) -> ResponseCode {
    if question.query_class() != DNSClass::IN {
        return ResponseCode::Refused;
    }
    let name = question.name().to_lowercase().to_ascii();
    let name = name.trim_end_matches('.');
    let (addresses, code) = match names.find(name) {
        Known::Addresses(addresses) => (Some(addresses), ResponseCode::NoError),
        Known::Absent => (None, ResponseCode::NXDomain),
        Known::Foreign => return ResponseCode::Refused,
    };
    message.metadata.authoritative = true;
    let is_asked = |ip: &&IpAddr| match question.query_type() {
        RecordType::A => ip.is_ipv4(),
        RecordType::AAAA => ip.is_ipv6(),
        RecordType::ANY => true,
        _ => false,
    };
    for ip in addresses.into_iter().flatten().filter(is_asked) {
        let record = Record::from_rdata(question.name().clone(), TTL, (*ip).into());
        message.add_answer(record);
    }
    if message.answers.is_empty()
        && let Ok(zone) = Name::from_ascii(names.zone(name))
    {
        message.add_authority(start_of_authority(zone));
    }
    code
}

/// Returns the record by which clients may keep a negative answer (RFC 2308 section 3). There are
/// no transfers of the zone, for which the other times and the serial are.
fn start_of_authority(zone: Name) -> Record {
    let time = TTL.cast_signed();
    let soa = SOA::new(zone.clone(), zone.clone(), 1, time, time, time, TTL);
    Record::from_rdata(zone, TTL, RData::SOA(soa))
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use hickory_resolver::proto::rr::Name;

    use super::super::names::tests::config;
    use super::*;

    fn ask(names: &Names, query: &Message, transport: Transport) -> Message {
        let bytes = answer(names, &query.to_vec().expect("a query"), transport);
        Message::from_vec(&bytes.expect("an answer")).expect("a message")
    }

    fn query(name: &str, kind: RecordType) -> Message {
        let mut query = Message::query();
        query.add_query(Query::query(Name::from_str(name).expect("a name"), kind));
        query
    }

    #[test]
    fn names_have_addresses_or_a_code_that_says_why_not() {
        let bindings = [("echo.global", "127.0.0.2:80"), ("six.global", "[::1]:80")];
        let names = Names::new(&config(&bindings, "240.0.0.0/4"));
        for (name, kind, code, addresses) in [
            ("echo.global.", RecordType::A, ResponseCode::NoError, 1),
            ("ECHO.Global.", RecordType::A, ResponseCode::NoError, 1),
            ("echo.global.", RecordType::AAAA, ResponseCode::NoError, 0),
            ("six.global.", RecordType::AAAA, ResponseCode::NoError, 1),
            ("echo.global.", RecordType::TXT, ResponseCode::NoError, 0),
            ("nothing.global.", RecordType::A, ResponseCode::NXDomain, 0),
            ("example.com.", RecordType::A, ResponseCode::Refused, 0),
            (".", RecordType::NS, ResponseCode::Refused, 0),
        ] {
            let query = query(name, kind);
            let answer = ask(&names, &query, Transport::Udp);
            assert_eq!(answer.metadata.response_code, code, "{name}");
            assert_eq!(answer.answers.len(), addresses, "{name}");
            assert_eq!(answer.metadata.id, query.metadata.id);
            assert_eq!(answer.queries, query.queries);
            let is_own = code != ResponseCode::Refused;
            assert_eq!(answer.metadata.authoritative, is_own, "{name}");
            let is_negative = is_own && addresses == 0;
            let zones = answer.authorities.iter();
            let zones = zones.filter(|one| one.record_type() == RecordType::SOA && one.ttl == TTL);
            let zones: Vec<_> = zones.map(|one| one.name.to_ascii()).collect();
            assert_eq!(zones == ["global."], is_negative, "{name} {zones:?}");
        }
    }

    #[test]
    fn a_name_outside_all_families_is_a_zone_of_its_own() {
        let names = Names::new(&config(&[("echo.example", "127.0.0.2:80")], "240.0.0.0/4"));
        let answer = ask(&names, &query("Echo.Example.", RecordType::AAAA), Transport::Udp);
        assert_eq!(answer.authorities[0].name.to_ascii(), "echo.example.");
    }

    #[test]
    fn a_newer_version_of_edns_is_not_answered() {
        let names = Names::new(&config(&[("echo.global", "127.0.0.2:80")], "240.0.0.0/4"));
        for (version, code, addresses) in [(0, 0, 1), (1, 16, 0)] {
            let mut query = query("echo.global.", RecordType::A);
            let mut edns = Edns::new();
            edns.set_version(version);
            query.set_edns(edns);
            let answer = ask(&names, &query, Transport::Udp);
            assert_eq!(u16::from(answer.metadata.response_code), code);
            assert_eq!(answer.answers.len(), addresses);
            assert_eq!(answer.edns.map(|edns| edns.version()), Some(0));
        }
    }

    #[test]
    fn an_answer_that_is_too_long_for_udp_is_truncated() {
        let addresses: Vec<_> = (1..=60).map(|last| format!("127.0.0.{last}:80")).collect();
        let bindings: Vec<_> = addresses.iter().map(|one| ("echo.global", &**one)).collect();
        let names = Names::new(&config(&bindings, "240.0.0.0/4"));
        let mut query = query("echo.global.", RecordType::A);
        let short = ask(&names, &query, Transport::Udp);
        assert!(short.metadata.truncation && short.answers.is_empty());
        let whole = ask(&names, &query, Transport::Tcp);
        assert!(!whole.metadata.truncation);
        assert_eq!(whole.answers.len(), 60);
        let mut edns = Edns::new();
        edns.set_max_payload(4096);
        query.set_edns(edns);
        let long = ask(&names, &query, Transport::Udp);
        assert_eq!((long.answers.len(), long.max_payload()), (60, UDP_BYTES_MAX));
    }

    #[test]
    fn a_refusal_is_no_larger_than_the_query() {
        let query = query("echo.global.", RecordType::A);
        let bytes = query.to_vec().expect("bytes");
        let refusal = refuse(&bytes).expect("a refusal");
        assert!(refusal.len() <= bytes.len());
        let message = Message::from_vec(&refusal).expect("a message");
        assert_eq!(message.metadata.response_code, ResponseCode::Refused);
        assert_eq!(message.metadata.message_type, MessageType::Response);
        assert_eq!(message.metadata.id, query.metadata.id);
        assert_eq!(refuse(&refusal), None, "no answer to an answer");
        assert_eq!(refuse(&bytes[..HEADER_BYTES - 1]), None);
    }

    #[test]
    fn what_is_no_query_gets_no_answer_and_a_broken_one_a_format_error() {
        let names = Names::default();
        let reply = Message::response(7, OpCode::Query).to_vec().expect("bytes");
        assert_eq!(answer(&names, &reply, Transport::Udp), None);
        for short in 0..HEADER_BYTES {
            assert_eq!(answer(&names, &vec![0; short], Transport::Udp), None);
        }
        let mut broken = query("echo.global.", RecordType::A).to_vec().expect("bytes");
        broken.truncate(HEADER_BYTES + 3);
        let bytes = answer(&names, &broken, Transport::Udp).expect("an answer");
        let message = Message::from_vec(&bytes).expect("a message");
        assert_eq!(message.metadata.response_code, ResponseCode::FormErr);
        let none = ask(&names, &Message::query(), Transport::Udp);
        assert_eq!(none.metadata.response_code, ResponseCode::FormErr);
        let mut update = query("echo.global.", RecordType::A);
        update.metadata.op_code = OpCode::Notify;
        let refused = ask(&names, &update, Transport::Udp);
        assert_eq!(refused.metadata.response_code, ResponseCode::NotImp);
    }
}
