//! End-to-end tests of the gateway: its own process, real sockets, TLS and HTTP/2.

#![expect(unreachable_pub, reason = "a test binary exports nothing, and plain `pub` reads better")]

#[cfg(test)]
mod support;

#[cfg(test)]
mod access_log;
#[cfg(test)]
mod aging;
#[cfg(test)]
mod alerts;
#[cfg(test)]
mod alike;
#[cfg(test)]
mod authority;
#[cfg(test)]
mod balance;
#[cfg(test)]
mod balancers;
#[cfg(test)]
mod binding_clients;
#[cfg(test)]
mod binding_donors;
#[cfg(test)]
mod binding_ends;
#[cfg(test)]
mod bindings;
#[cfg(test)]
mod budget;
#[cfg(test)]
mod certificates;
#[cfg(test)]
mod cgroup;
#[cfg(test)]
mod churn;
#[cfg(test)]
mod clusters;
#[cfg(test)]
mod collisions;
#[cfg(test)]
mod conformance;
#[cfg(test)]
mod dashboard;
#[cfg(test)]
mod delivery;
#[cfg(test)]
mod directory;
#[cfg(test)]
mod dns;
#[cfg(test)]
mod drain;
#[cfg(test)]
mod drains;
#[cfg(test)]
mod dump;
#[cfg(test)]
mod ends;
#[cfg(test)]
mod envoy_source;
#[cfg(test)]
mod examples;
#[cfg(test)]
mod explain;
#[cfg(test)]
mod fairness;
#[cfg(test)]
mod families;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod floods;
#[cfg(test)]
mod hold;
#[cfg(test)]
mod identity;
#[cfg(test)]
mod identity_cache;
#[cfg(test)]
mod issuers;
#[cfg(test)]
mod istio;
#[cfg(test)]
mod istio_faults;
#[cfg(test)]
mod istio_records;
#[cfg(test)]
mod istiod_exports;
#[cfg(test)]
mod istiod_recorder;
#[cfg(test)]
mod istiod_recordings;
#[cfg(test)]
mod istiod_rules;
#[cfg(test)]
mod kubelet;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod links;
#[cfg(test)]
mod listeners;
#[cfg(test)]
mod locality;
#[cfg(test)]
mod loops;
#[cfg(test)]
mod names;
#[cfg(test)]
mod object_entries;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod passthrough;
#[cfg(test)]
mod peers;
#[cfg(test)]
mod pod;
#[cfg(test)]
mod pod_listeners;
#[cfg(test)]
mod policy;
#[cfg(test)]
mod quiet;
#[cfg(test)]
mod regions;
#[cfg(test)]
mod reload;
#[cfg(test)]
mod reload_under_load;
#[cfg(test)]
mod remote_faults;
#[cfg(test)]
mod rollout;
#[cfg(test)]
mod roots;
#[cfg(test)]
mod scope;
#[cfg(test)]
mod scrapes;
#[cfg(test)]
mod shares;
#[cfg(test)]
mod slow;
#[cfg(test)]
mod soak;
#[cfg(test)]
mod start;
#[cfg(test)]
mod starved;
#[cfg(test)]
mod status;
#[cfg(test)]
mod subsets;
#[cfg(test)]
mod take_over;
#[cfg(test)]
mod tenants;
#[cfg(test)]
mod times;
#[cfg(test)]
mod tls;
#[cfg(test)]
mod traces;
#[cfg(test)]
mod transit;
#[cfg(test)]
mod transit_shares;
#[cfg(test)]
mod trust;
#[cfg(test)]
mod tunnel_sni;
#[cfg(test)]
mod waypoint;
