//! Tests of the reasons' labels, levels and answers.

use super::*;

#[test]
fn a_dial_without_a_free_descriptor_port_or_buffer_is_no_failure_of_the_endpoint() {
    for (errno, reason) in [
        (Errno::MFILE, Reason::Overloaded),
        (Errno::NFILE, Reason::Overloaded),
        (Errno::NOBUFS, Reason::Overloaded),
        (Errno::ADDRNOTAVAIL, Reason::Overloaded),
        (Errno::CONNREFUSED, Reason::DialRefused),
        (Errno::TIMEDOUT, Reason::DialTimeout),
        (Errno::HOSTUNREACH, Reason::DialFailed),
    ] {
        assert_eq!(Reason::of_dial(&errno.into()), reason, "{errno}");
    }
}

#[test]
fn what_a_peer_may_not_learn_looks_alike() {
    let alike = [
        Reason::UnknownService,
        Reason::NotExposed,
        Reason::NotForPeer,
        Reason::NotLinked,
        Reason::NoEndpoint,
        Reason::NoWaypoint,
    ];
    let answers = alike.map(Reason::status);
    assert_eq!(answers, [StatusCode::SERVICE_UNAVAILABLE; 6]);
    assert_eq!(alike.map(Reason::alert), [112; 6]);
    assert_eq!(Reason::UnknownSni.alert(), 112);
}

#[test]
fn no_broken_tunnel_ends_by_a_code_that_peers_read_as_clean() {
    for reason in Reason::ALL {
        let code = reason.reset_code();
        assert!(code != h2::Reason::CANCEL && code != h2::Reason::NO_ERROR, "{reason}");
    }
}

#[test]
fn labels_are_unique() {
    let mut labels: Vec<_> = Reason::ALL.iter().map(|reason| reason.label()).collect();
    labels.sort_unstable();
    labels.dedup();
    assert_eq!(labels.len(), Reason::ALL.len());
    let mut labels: Vec<_> = HandshakeRefusal::ALL.iter().map(|r| r.label()).collect();
    labels.sort_unstable();
    labels.dedup();
    assert_eq!(labels.len(), HandshakeRefusal::ALL.len());
}
