//! Table of `strait conformance`: this gateway has no finding, and others that do not conform have.

use std::collections::BTreeSet;
use std::time::Duration;

use strait::tools::conformance::{Case, Group, Names, Target, Verdict, endpoint, table};
use strait::tools::hbone;
use tokio::io::AsyncWriteExt;

use crate::support::{CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, identities, run};

/// Limit of a flood, which Strait ends long before.
const FLOOD_MAX: Duration = Duration::from_secs(30);

fn names() -> Names {
    Names { echo: ECHO.into(), unknown: "nothing.here:80".into() }
}

fn target(net: Net) -> Target {
    let material = identities().material(&identities().leaf(CLIENT));
    Target::new(net.address(1, 15008), material, names()).expect("a target")
}

fn accepting_tls() -> std::sync::Arc<rustls::ServerConfig> {
    let material = identities().material(&identities().leaf(GATEWAY));
    strait::tls::server_config_any_client(&material).expect("a server")
}

/// Runs the cases of a group, and returns the findings.
async fn findings(target: &Target, wants: impl Fn(&Case) -> bool) -> BTreeSet<String> {
    let mut findings = BTreeSet::new();
    let mut count = 0;
    for case in table(target, FLOOD_MAX).into_iter().filter(wants) {
        count += 1;
        match case.run(target, true).await {
            Verdict::Passed => {}
            other => drop(findings.insert(format!("{} {}: {other:?}", case.section, case.name))),
        }
    }
    assert!(count > 0, "no case");
    findings
}

fn has_no_finding(wants: impl Fn(&Case) -> bool) {
    run(async {
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, |stream| async move {
            let _ = endpoint::serve(stream).await;
        });
        let _gateway = Gateway::start(&settings).await;
        let mut target = target(net);
        target.probe().await.expect("a tunnel");
        assert!(target.is_scripted);
        let findings = findings(&target, wants).await;
        assert!(findings.is_empty(), "{findings:#?}");
    });
}

#[test]
fn tls_has_no_finding() {
    has_no_finding(|case| case.group == Group::Tls);
}

fn is_of(case: &Case, sections: &[&str]) -> bool {
    let is_within = |section: &&str| {
        let rest = case.section.strip_prefix(section);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    case.group == Group::Http2 && sections.iter().any(is_within)
}

/// Sections of RFC 9113, in parts that run beside each other.
const PARTS: [&[&str]; 6] = [
    &["3", "4", "5.2"],
    &["5.1"],
    &["6.1", "6.2", "6.3", "6.4"],
    &["6.5", "6.6", "6.7", "6.8"],
    &["6.9", "6.10"],
    &["8"],
];

#[test]
fn connections_have_no_finding() {
    has_no_finding(|case| is_of(case, PARTS[0]));
}

#[test]
fn states_have_no_finding() {
    has_no_finding(|case| is_of(case, PARTS[1]));
}

#[test]
fn frames_of_streams_have_no_finding() {
    has_no_finding(|case| is_of(case, PARTS[2]));
}

#[test]
fn frames_of_a_connection_have_no_finding() {
    has_no_finding(|case| is_of(case, PARTS[3]));
}

#[test]
fn windows_and_fragments_have_no_finding() {
    has_no_finding(|case| is_of(case, PARTS[4]));
}

#[test]
fn messages_have_no_finding() {
    has_no_finding(|case| is_of(case, PARTS[5]));
}

#[test]
fn tunnels_have_no_finding() {
    has_no_finding(|case| case.group == Group::Tunnels);
}

#[test]
fn every_case_is_in_one_part_and_has_a_name_of_its_own() {
    let mut seen = BTreeSet::new();
    for case in table(&target(Net::new()), FLOOD_MAX) {
        let parts = PARTS.iter().filter(|part| is_of(&case, part)).count();
        assert_eq!(parts, usize::from(case.group == Group::Http2), "{case:?}");
        assert!(seen.insert((case.group.to_string(), case.section, case.name.clone())), "{case:?}");
    }
    assert!(seen.len() > 300, "{}", seen.len());
}

/// A gateway that answers every CONNECT with 200, and every byte with itself, has these findings.
#[test]
fn a_gateway_that_accepts_everything_has_findings() {
    run(async {
        let net = Net::new();
        let serving =
            hbone::serve(net.listen(1, 15008).await, accepting_tls(), |mut incoming| async move {
                while let Ok(Some(bytes)) = incoming.tunnel.chunk().await {
                    if incoming.tunnel.send(bytes).await.is_err() {
                        return;
                    }
                }
                let _ = incoming.tunnel.shutdown().await;
            });
        let _serving = tokio::spawn(serving);
        let mut target = target(net);
        target.probe().await.expect("a tunnel");
        assert!(!target.is_scripted);
        let found =
            findings(&target, |case| matches!(case.group, Group::Tls | Group::Tunnels)).await;
        assert!(found.iter().any(|one| one.starts_with("1.5 unknown authority")), "{found:#?}");
        let skipped =
            findings(&target, |case| case.name == "DATA in state half-closed (local)").await;
        assert!(skipped.iter().all(|one| one.contains("Skipped")), "{skipped:#?}");
        assert_eq!(skipped.len(), 1);
    });
}
