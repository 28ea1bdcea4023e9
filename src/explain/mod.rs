//! Dry run of a tunnel: its predicted outcome, with the decisions that lead to it.
//!
//! It calls the same stages as [`forward`](crate::datapath::forward), so that the answer cannot
//! differ from real tunnels. It computes the probability of each pick in place of one pick, and
//! dials nothing. It neither counts nor logs. It cannot tell whether an endpoint answers.

mod answer;
mod binding;
mod endpoints;
mod outcomes;
mod question;
mod remedies;
mod rules;
mod servers;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::time::Instant;

use crate::config::parse_identity;
use crate::datapath::client_hello::{ClientHello, is_istio_alpn};
use crate::datapath::dial::{DenyList, remote};
use crate::datapath::http2::tunnel::{Forwarded, Origin, Target};
use crate::datapath::identity::Peer;
use crate::datapath::listener::{Listener, ListenerRules};
use crate::datapath::policy::{self, Permit};
use crate::datapath::route::{self, Route};
use crate::reason::{HandshakeRefusal, Reason};
use crate::snapshot::{Enforcement, Snapshot};
use crate::status::ReducedLink;
use crate::tls::{Identity, Issuer};
use crate::wire::sni::{self, RouteBy};
use crate::wire::{Authority, HOPS_MAX, SpkiHash, Via};

pub use answer::{
    Answer, EndpointRow, EntryRow, GroupRow, ListenerRow, LookupRow, Outcome, PeerRow,
    RejectionForm, RouteRow, RuleRow, UnusedRow,
};
use question::OWN_HASH;
pub use question::Question;
pub use remedies::ConfigPositions;

const NO_TARGET: &str = "no target; write --to with an authority, such as `--to \
                         echo.app.svc.cluster.local:80`, or --sni with a server name";

/// State that the question is evaluated against.
#[derive(Clone, Copy, Debug)]
pub struct ExplainState<'a> {
    /// Snapshot of mesh and rules.
    pub snapshot: &'a Snapshot,
    /// Addresses that are never dialled.
    pub deny: &'a DenyList,
    /// Listeners by name.
    pub listeners: &'a [(String, ListenerRules)],
    /// Listeners of bindings.
    pub bindings: &'a [Arc<Listener>],
    /// Positions of the configuration's entries.
    pub places: &'a ConfigPositions,
    /// Links whose exceeded budget reduces weights.
    pub links: &'a [ReducedLink],
    /// True if the budget of buffered bytes admits a new tunnel.
    pub has_room: bool,
    /// Time of the question, which decides which ejections have ended.
    pub now: Instant,
}

/// Predicts the outcome of a tunnel.
///
/// # Errors
/// The defect of the question, with the remedy.
pub fn run(state: &ExplainState<'_>, question: &Question) -> Result<Answer, String> {
    let forwarded = question.forwarded()?;
    let explainer = Explainer { state, question, forwarded: forwarded.as_ref() };
    if let Some(wanted) = &question.binding {
        return binding::run(explainer, wanted);
    }
    let (name, listener) = select_listener(state, question)?;
    let is_tls = listener.is_passthrough();
    let protocol = if is_tls { "tls" } else { "hbone" };
    let mut answer = Answer {
        snapshot: state.snapshot.version,
        listener: ListenerRow { name: name.clone(), protocol: protocol.to_owned() },
        policies: enforcement(state.snapshot).to_owned(),
        ..Answer::default()
    };
    match question.address {
        Some(address) if !listener.admits(address) => {
            answer.outcome = Outcome::not_in_sources();
            return Ok(answer);
        }
        None if listener.has_sources() => {
            let note = "the listener has `sources`; test a peer's address by --address";
            answer.notes.push(note.to_owned());
        }
        _ => {}
    }
    answer.outcome = if is_tls {
        explainer.explain_client_hello(listener, &mut answer)?
    } else {
        explainer.explain_connect(listener, &mut answer)?
    };
    Ok(answer)
}

/// Returns the listener that the question applies to.
fn select_listener<'a>(
    state: &ExplainState<'a>,
    question: &Question,
) -> Result<&'a (String, ListenerRules), String> {
    let all = state.listeners.iter();
    let names = |listeners: Vec<&(String, ListenerRules)>| {
        let names: Vec<_> = listeners.iter().map(|(name, _)| name.as_str()).collect();
        names.join(", ")
    };
    if let Some(wanted) = &question.listener {
        let found = all.clone().find(|(name, _)| name == wanted);
        return found.ok_or_else(|| {
            let names = names(all.collect());
            format!("unknown listener {wanted:?}; write one of {names}")
        });
    }
    let is_tls = match (&question.to, &question.sni) {
        (Some(_), _) => false,
        (None, Some(_)) => true,
        (None, None) => {
            return Err(NO_TARGET.to_owned());
        }
    };
    let fitting: Vec<_> = all.filter(|(_, of)| of.is_passthrough() == is_tls).collect();
    match (&fitting[..], is_tls) {
        ([], true) => Err("there is no TLS listener; write --from and --to".to_owned()),
        ([], false) => Err("there is no HBONE listener; write --sni instead of --to".to_owned()),
        ([_, _, ..], true) => {
            let names = names(fitting);
            Err(format!("several TLS listeners; write --listener with one of {names}"))
        }
        ([first, ..], _) => Ok(first),
    }
}

/// Question with the state that it is evaluated against.
#[derive(Clone, Copy)]
struct Explainer<'a> {
    state: &'a ExplainState<'a>,
    question: &'a Question,
    /// Headers of gateways that the tunnel has passed.
    forwarded: Option<&'a Forwarded>,
}

impl Explainer<'_> {
    /// Explains a connection to a TLS listener.
    fn explain_client_hello(
        self,
        listener: &ListenerRules,
        answer: &mut Answer,
    ) -> Result<Outcome, String> {
        let question = self.question;
        let has_identity = question.from.is_some() || question.cluster.is_some();
        let has_header = question.origin.is_some() || self.forwarded.is_some();
        if has_identity || question.to.is_some() || has_header {
            let what = "peers of a TLS listener present no certificate and send no CONNECT; write \
                        --sni and --alpn, and neither --from, --cluster, --to, --origin, --source \
                        nor --via";
            return Err(what.to_owned());
        }
        let peer = Peer::unauthenticated(question.address(), Arc::default(), None);
        answer.peer = rules::peer(&peer);
        let offers_istio = question.alpn.iter().any(|one| is_istio_alpn(one.as_bytes()));
        let hello = ClientHello::without_bytes(question.sni.as_deref(), offers_istio);
        let form = RejectionForm::Alert;
        if !self.state.has_room {
            return Ok(Outcome::refused(Reason::BuffersFull, form));
        }
        let from = listener.describe_match(hello.sni.as_deref());
        let wanted = match listener.target(&hello) {
            Ok(wanted) => wanted,
            Err(reason) => {
                let names = listener.server_names();
                let (names, snapshot) = (names.as_deref(), self.state.snapshot);
                let lookup = rules::unrouted(snapshot, &hello, from, reason, names);
                answer.lookups.push(lookup);
                return Ok(Outcome::refused(reason, form));
            }
        };
        let target = Target {
            authority: wanted.authority.clone(),
            origin: Origin::Workload,
            forwarded: None,
        };
        let route = route::resolve_passthrough(self.state.snapshot, &peer, target);
        let (mut lookup, permit) =
            self.evaluate(&peer, &wanted.authority, route, wanted.granted_by_listener);
        lookup.from = Some(from);
        answer.lookups.push(lookup);
        Ok(self.pick(&peer, permit, form, answer))
    }

    /// Authenticates the peer with the identity of the question, or returns the outcome.
    fn authenticate(
        self,
        listener: Arc<Listener>,
        answer: &mut Answer,
    ) -> Result<Result<Peer, Outcome>, String> {
        let identity = self.identity()?;
        let issuer = self.issuer(&identity.trust_domain)?;
        let (address, snapshot) = (self.question.address(), self.state.snapshot);
        let peer = Peer::authenticated(identity.clone(), issuer, address, listener, snapshot);
        answer.peer = rules::identity(&identity, &peer, snapshot);
        Ok(match peer {
            Ok(peer) => self.refused_issuer(&peer, answer).map_or(Ok(peer), Err),
            Err(refusal) => Err(Outcome::handshake_rejected(refusal)),
        })
    }

    /// Returns the outcome of the policy evaluation and of the pick after it.
    fn pick(
        self,
        peer: &Peer,
        permit: Result<Permit, Reason>,
        form: RejectionForm,
        answer: &mut Answer,
    ) -> Outcome {
        match permit {
            Err(reason) => Outcome::refused(reason, form),
            Ok(permit) => endpoints::run(self, peer, &permit, form, answer),
        }
    }

    /// Explains a CONNECT to an HBONE listener.
    fn explain_connect(
        self,
        listener: &ListenerRules,
        answer: &mut Answer,
    ) -> Result<Outcome, String> {
        let origin = self.question.origin()?;
        let Some(to) = &self.question.to else {
            return Err("an HBONE listener routes by an authority; write --to with one, such as \
                        `--to echo.app.svc.cluster.local:80`"
                .to_owned());
        };
        let listener_of_peer = Arc::new(Listener::with_transit(listener.transit()));
        let peer = match self.authenticate(listener_of_peer, answer)? {
            Ok(peer) => peer,
            Err(refused) => return Ok(refused),
        };
        let snapshot = self.state.snapshot;
        let first_peer = rules::first_peer(snapshot, &peer, self.question.source.as_deref());
        answer.notes.extend(first_peer);
        let form = RejectionForm::Status;
        let Ok(authority) = Authority::parse(to) else {
            answer.lookups.push(rules::no_authority(self.state.snapshot, to));
            return Ok(Outcome::refused(Reason::BadAuthority, form));
        };
        if !self.state.has_room {
            return Ok(Outcome::refused(Reason::BuffersFull, form));
        }
        if let Err(reason) = remote::check_loop(|| Some(OWN_HASH), self.forwarded) {
            answer.lookups.push(describe_loop(&authority, self.forwarded));
            return Ok(Outcome::refused(reason, form));
        }
        let (mut lookup, permit) = self.resolve_and_evaluate(&peer, authority, origin);
        let route_by = permit.as_ref().ok().map(|permit| {
            let route = permit.route();
            let of = route.service_port();
            let own = self.state.snapshot.route_by(route.requested(), of, route.matched_by());
            own.unwrap_or_else(|| listener.route_by())
        });
        if let (Some(route), Some(route_by)) = (&mut lookup.route, route_by) {
            route.route_by = route_by.to_string();
        }
        answer.lookups.push(lookup);
        Ok(match (permit, route_by) {
            (Ok(permit), Some(RouteBy::Sni)) => self.explain_sni_routing(&peer, &permit, answer),
            (Ok(permit), Some(RouteBy::Strict)) => self.explain_strict_sni(&peer, permit, answer),
            (permit, _) => {
                if permit.is_ok() && self.question.sni.is_some() {
                    let note = "the server name inside this tunnel is not evaluated";
                    answer.notes.push(note.to_owned());
                }
                self.pick(&peer, permit, form, answer)
            }
        })
    }

    /// Explains a tunnel that is answered and then routed by the server name of the TLS inside
    /// it.
    fn explain_sni_routing(self, peer: &Peer, outer: &Permit, answer: &mut Answer) -> Outcome {
        let Some(name) = &self.question.sni else {
            return Outcome {
                description: "answered by 200, and then routed by the server name of the TLS \
                              inside the tunnel; add --sni to see the target"
                    .to_owned(),
                ..Outcome::opened(RejectionForm::Reset)
            };
        };
        let from = "by the server name of the TLS inside the tunnel".to_owned();
        let (origin, port) = (outer.route().origin(), outer.route().requested().port);
        let target = sni::normalise(name).map(|name| sni::authority_of(&name, port));
        let Some(authority) = target else {
            let (hello, reason) =
                (ClientHello::without_bytes(Some(name), false), Reason::UnknownSni);
            let lookup = rules::unrouted(self.state.snapshot, &hello, from, reason, None);
            answer.lookups.push(lookup);
            return Outcome::refused(reason, RejectionForm::Reset);
        };
        let (mut lookup, permit) = self.resolve_and_evaluate(peer, authority, origin);
        lookup.from = Some(from);
        answer.lookups.push(lookup);
        self.pick(peer, permit, RejectionForm::Reset, answer)
    }

    /// Explains a tunnel that is dialled and answered, and then checked against the server name
    /// inside it.
    fn explain_strict_sni(self, peer: &Peer, permit: Permit, answer: &mut Answer) -> Outcome {
        let outcome = endpoints::run(self, peer, &permit, RejectionForm::Status, answer);
        let endpoint = permit.route().endpoints().endpoints.first().cloned();
        let (true, Some(endpoint)) = (outcome.opened, endpoint) else {
            return outcome;
        };
        let Some(name) = &self.question.sni else {
            let note = "the server name of the TLS inside the tunnel must be one of the service's; \
                        add --sni to see whether one is";
            answer.notes.push(note.to_owned());
            return outcome;
        };
        let grant = permit.into_grant(endpoint);
        let is_its =
            |name: &str| policy::is_name_of_service(self.state.snapshot, peer, &grant, name);
        if sni::normalise(name).is_some_and(|name| is_its(&name)) {
            return outcome;
        }
        Outcome { or: outcome.or, ..Outcome::refused(Reason::SniMismatch, RejectionForm::Reset) }
    }

    fn resolve_and_evaluate(
        self,
        peer: &Peer,
        authority: Authority,
        origin: Origin,
    ) -> (LookupRow, Result<Permit, Reason>) {
        let target = Target {
            authority: authority.clone(),
            origin,
            forwarded: self.forwarded.cloned().map(Box::new),
        };
        let route = route::resolve(self.state.snapshot, peer, target);
        self.evaluate(peer, &authority, route, false)
    }

    /// Evaluates the policy of a route as the listener does, and describes the result.
    fn evaluate(
        self,
        peer: &Peer,
        requested: &Authority,
        route: Result<Route, Reason>,
        granted: bool,
    ) -> (LookupRow, Result<Permit, Reason>) {
        let snapshot = self.state.snapshot;
        let mut lookup = LookupRow { requested: requested.to_string(), ..LookupRow::default() };
        let route = match route {
            Ok(route) => route,
            Err(reason) => {
                lookup.rule = match reason {
                    Reason::BadSource => rules::malformed_first_peer(),
                    _ => rules::describe_unknown(self.state, peer, requested),
                };
                return (lookup, Err(reason));
            }
        };
        lookup.route = Some(rules::route(snapshot, peer, &route));
        if granted {
            lookup.rule = rules::listener_route_rule();
            return (lookup, policy::permit_listener_route(peer, route));
        }
        let refused = policy::check(snapshot, peer, &route).err();
        let by_peer = policy::check_caller(snapshot, peer.policy_source(), &route);
        lookup.rule = match route.first_peer() {
            Some(first) if refused.is_some() && by_peer.is_ok() => {
                rules::first_peer_rule(self.state, &first.as_peer(peer, snapshot), &route, refused)
            }
            _ => rules::rule(self.state, peer, &route, refused),
        };
        let limiting = policy::limiting_entries(snapshot, peer, &route);
        lookup.rule.description.extend(rules::limits(self.state, &limiting));
        let source = policy::charged_source(peer, route.first_peer());
        let is_full = refused.is_none() && limiting.iter().any(|entry| entry.is_full(&source));
        let permit =
            if is_full { Err(Reason::TunnelLimit) } else { policy::run(snapshot, peer, route) };
        (lookup, permit)
    }

    /// Refuses an issuer that may not sign for the peer's trust domain, as the handshake does.
    /// Without `trust.clusters` the question names no issuer, and a permitted one is assumed.
    fn refused_issuer(self, peer: &Peer, answer: &mut Answer) -> Option<Outcome> {
        let (trust, domain) = (&self.state.snapshot.trust, &peer.source.trust_domain);
        let permitted = trust.domain_issuers(domain)?;
        let has_cluster = |spki| trust.issuers().any(|(_, known)| known == spki);
        let is_permitted = match &peer.issuer {
            Some(issuer) => permitted.contains(&issuer.spki),
            None => permitted.iter().any(|spki| !has_cluster(spki)),
        };
        if is_permitted {
            answer.notes.extend((!trust.has_issuers()).then(|| {
                format!("the certificate is assumed to be of one of the `issuers` of {domain}")
            }));
            return None;
        }
        answer.peer.cluster = None;
        answer.peer.description = format!(
            "rejected in the handshake: its issuer is not one of the `issuers` of {domain} in \
             `trust.domains`; add it there, or select another cluster by --cluster"
        );
        let refusal = HandshakeRefusal::UntrustedIssuer;
        Some(Outcome::handshake_rejected(refusal))
    }

    /// Returns an issuer of the cluster in the question, if possible one that may sign for the
    /// trust domain; none without a cluster.
    fn issuer(self, domain: &str) -> Result<Option<Arc<Issuer>>, String> {
        let trust = &self.state.snapshot.trust;
        let Some(wanted) = &self.question.cluster else {
            return Ok(None);
        };
        if !trust.has_issuers() {
            return Err(format!(
                "cannot apply --cluster {wanted:?}: without `trust.clusters` the trust domain \
                 determines the cluster; omit --cluster"
            ));
        }
        let permitted = trust.domain_issuers(domain);
        let may_sign = |spki: &SpkiHash| permitted.is_none_or(|list| list.contains(spki));
        let own = trust.issuers().filter(|(name, _)| name == wanted);
        if let Some((_, spki)) = own.max_by_key(|(_, spki)| may_sign(spki)) {
            let (spki, subject) = (*spki, Box::default());
            return Ok(Some(Arc::new(Issuer { spki, subject })));
        }
        let names: BTreeSet<_> = trust.issuers().map(|(name, _)| name).collect();
        let names: Vec<_> = names.into_iter().collect();
        Err(format!(
            "`trust.clusters` has no {wanted:?}; write --cluster with one of {}, or omit it for an \
             issuer that none has",
            names.join(", ")
        ))
    }

    fn identity(self) -> Result<Identity, String> {
        const HOW: &str = "write --from with one, such as `--from \
                           spiffe://west.local/ns/shop/sa/checkout`";
        let Some(uri) = &self.question.from else {
            return Err(format!("the peer has an identity; {HOW}"));
        };
        let identity = parse(uri);
        identity.ok_or_else(|| format!("{uri:?} is not a workload identity; {HOW}"))
    }
}

/// Returns the mode in which Istio's policies are evaluated.
fn enforcement(snapshot: &Snapshot) -> &'static str {
    match snapshot.enforcement {
        Enforcement::Off => "off",
        Enforcement::Audit => "audit",
        Enforcement::Enforce => "enforce",
    }
}

/// Parses the identity of a hypothetical certificate.
fn parse(uri: &str) -> Option<Identity> {
    let [trust_domain, namespace, service_account] = parse_identity(uri)?.map(Arc::from);
    Some(Identity {
        uri: uri.into(),
        trust_domain,
        namespace,
        service_account,
        not_after: SystemTime::UNIX_EPOCH,
    })
}

/// Describes a tunnel whose `x-strait-via` names this gateway or too many others.
fn describe_loop(requested: &Authority, forwarded: Option<&Forwarded>) -> LookupRow {
    let via = forwarded.and_then(|forwarded| forwarded.via.as_deref());
    let description = if via.and_then(Via::parse).is_some() {
        "x-strait-via has this gateway, so that the tunnel has come back".to_owned()
    } else {
        format!("x-strait-via has more than {HOPS_MAX} gateways")
    };
    LookupRow {
        requested: requested.to_string(),
        rule: RuleRow {
            description,
            change: Some(
                "turn off `transit` of the service at one of the gateways that the tunnel has \
                 passed"
                    .to_owned(),
            ),
            ..RuleRow::default()
        },
        ..LookupRow::default()
    }
}
